"""Runs that another study has already made: the same recipe and seed, the same code, the same kind of machine."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from twoaxis.core.errors import TwoAxisError
from twoaxis.study.folder import Place, StudyFolder, write_json
from twoaxis.train.environment import describe_environment
from twoaxis.train.forward import choose_device, choose_dtype
from twoaxis.train.recipe import TrainConfig
from twoaxis.train.run_folder import RunFolder

SAME = ("code", "versions", "platform", "threads", "device", "device_name", "precision")
"""What must be equal where two runs are made, since it may change the last digits of a loss."""


def reuse(recipe: TrainConfig, place: Place, folder: StudyFolder, threads: int | None) -> Path | None:
    """Takes over a finished run of another study beside this one, if there is the same; returns its folder.

    The files are linked rather than copied where the file system can; a finished run never changes.

    Args:
        recipe: of the run, complete.
        place: where it belongs.
        folder: of this study; its neighbours are looked through.
        threads: that the run would compute with; nothing is taken over while they are not known.
    """
    if folder.run(place).path.exists() or threads is None:
        return None
    device = choose_device(recipe.device)
    here = {**describe_environment(device, choose_dtype(recipe.precision, device)), "threads": threads}
    for other in _finished_runs(folder):
        if _same(other, recipe, here):
            _take(other, folder.run(place))
            return other
    return None


def _finished_runs(folder: StudyFolder) -> Iterator[Path]:
    """Folders of finished runs of the studies beside this one, in order of their names."""
    for study in sorted(folder.path.resolve().parent.glob("*/study.json")):
        if study.parent != folder.path.resolve():
            yield from sorted(path.parent for path in study.parent.glob("runs/*/seed-*/result.json"))


def _same(run: Path, recipe: TrainConfig, here: dict[str, Any]) -> bool:
    folder = RunFolder(run)
    try:
        result, environment = folder.result, folder.read("env")
        equal = folder.read("config") == recipe.to_data()
    except TwoAxisError:
        # A damaged neighbour is no reason to stop; the run is simply made.
        return False
    finished = result is not None and result.status == "finished"
    return equal and finished and all(environment.get(key) == here[key] for key in SAME)


def _take(run: Path, into: RunFolder) -> None:
    draft = into.path.with_name(f".{into.path.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    shutil.copytree(run, draft, copy_function=_link_or_copy, ignore=shutil.ignore_patterns(".lock"))
    write_json(draft / "reused.json", {"from": str(run)})
    draft.replace(into.path)


def _link_or_copy(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target
