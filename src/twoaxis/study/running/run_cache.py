"""Reuse of runs that another study has made with the same recipe, seed, text, code and kind of machine."""

import contextlib
import json
import os
import shutil
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from twoaxis.core.errors import TwoAxisError
from twoaxis.core.files import new_folder
from twoaxis.data import prepare
from twoaxis.study.running.study_folder import RunKey, StudyFolder
from twoaxis.train.environment import describe_environment
from twoaxis.train.recipe import TrainConfig
from twoaxis.train.run_folder import RunFolder, json_bytes
from twoaxis.train.token_loss import choose_device, choose_dtype

SAME = ("code", "versions", "platform", "threads", "device", "device_name", "precision", "kernels")
"""Keys of the environment that may change the last digits of a loss, and so must be equal."""


class RunCache:
    """Finished runs of the other studies in the parent folder, read at the first lookup.

    Args:
        folder: of the study itself.
        threads: of its runs; nothing is reused while unknown.
    """

    def __init__(self, folder: StudyFolder, threads: int | None) -> None:
        self.folder, self.threads = folder, threads
        self._described: dict[tuple[str, str], dict[str, Any]] = {}
        self._read: dict[str, list[str]] = {}

    def lookup(self, recipe: TrainConfig, key: RunKey) -> str:
        """Links an equal run of another study into this one; returns its relative path, or "" without one.

        Files are copied where the file system has no hard links. A finished run never changes.
        """
        if self.threads is None or self.folder.run(key).path.exists():
            return ""
        wanted, here = recipe.to_data(), self._here(recipe)
        for run, config, environment, data in self._finished:
            same = config == wanted and all(environment.get(key) == here[key] for key in SAME)
            # A recipe names a text by its path, and the text there may have changed.
            if same and data == self._fingerprints(recipe):
                name = run.relative_to(self._studies).as_posix()
                _link(run, self.folder.run(key), name)
                return name
        return ""

    @property
    def _studies(self) -> Path:
        return self.folder.path.resolve().parent

    @cached_property
    def _finished(self) -> list[tuple[Path, dict[str, Any], dict[str, Any], list[str]]]:
        """Folder, recipe, environment and fingerprints of the data of each run, sorted by name."""
        found = []
        for study in sorted(self._studies.glob("*/study.json")):
            if study.parent != self.folder.path.resolve():
                for result in sorted(study.parent.glob("runs/*/seed-*/result.json")):
                    run = RunFolder(result.parent)
                    # A damaged run of another study is ignored.
                    with contextlib.suppress(TwoAxisError):
                        if run.result is not None and run.result.status == "finished":
                            data = _fingerprints(run.read("data"))
                            found.append((run.path, run.config.to_data(), run.read("env"), data))
        return found

    def _fingerprints(self, recipe: TrainConfig) -> list[str]:
        """Those of the data that the run would read; cached, since finding them reads the whole text."""
        key = json.dumps(recipe.data.to_data(), sort_keys=True)
        if key not in self._read:
            self._read[key] = _fingerprints(prepare(recipe.data.corpus, recipe.data.tokenizer).to_data())
        return self._read[key]

    def _here(self, recipe: TrainConfig) -> dict[str, Any]:
        """The environment that the run would record; cached, since describing it runs git."""
        device = choose_device(recipe.device)
        dtype = choose_dtype(recipe.precision, device)
        key = str(device), str(dtype)
        if key not in self._described:
            self._described[key] = {**describe_environment(device, dtype), "threads": self.threads}
        return self._described[key]


def _fingerprints(data: Mapping[str, Any]) -> list[str]:
    return [data[what]["fingerprint"] for what in ("corpus", "tokenizer")]


def _link(run: Path, into: RunFolder, name: str) -> None:
    with new_folder(into.path, "run folder") as draft:
        ignored = shutil.ignore_patterns(".lock")
        shutil.copytree(run, draft, copy_function=_link_or_copy, ignore=ignored, dirs_exist_ok=True)
        (draft / "reused.json").write_bytes(json_bytes({"from": name}))


def _link_or_copy(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target
