"""Checkpoints: folders that are written atomically and verified by checksums, at once or while training goes on."""

import contextlib
import hashlib
import json
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from twoaxis.core.errors import CheckpointError, problem, system_reason
from twoaxis.core.files import draft_of, sync
from twoaxis.core.text import json_value

FORMAT, FORMAT_SHARDED = 1, 2
"""The formats of a checkpoint: written by one process, and by the ranks of a sharded run."""

TENSOR_FILES = ("model", "optimizer")
"""The safetensors files of a checkpoint."""


class Checkpoint(NamedTuple):
    """A checkpoint in memory: parameters by name, optimizer state by `kind/name of the parameter`, other JSON-ready data."""

    step: int
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    state: dict[str, Any]


def save_checkpoint(folder: Path, checkpoint: Checkpoint, keep: int) -> Path:
    """Writes `folder/step-00001234`, then removes all but the newest `keep` checkpoints.

    Raises:
        CheckpointError: the disk is full or cannot be written; earlier checkpoints are unchanged.
    """
    try:
        path = write_checkpoint(folder, checkpoint)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"checkpoint of step {checkpoint.step}: cannot be written to {folder} ({system_reason(error) or error}); earlier "
            "checkpoints are intact; free space there and run again to resume"
        ) from None
    remove_old(folder, keep)
    return path


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    """Writes `folder/step-00001234` atomically.

    Raises:
        OSError or SafetensorError: the disk is full or cannot be written.
    """
    path = path_of_step(folder, checkpoint.step)
    with draft_of(path) as draft:
        draft.mkdir()
        for name in TENSOR_FILES:
            tensors: Mapping[str, Tensor] = getattr(checkpoint, name)
            save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, draft / f"{name}.safetensors")
            sync(draft / f"{name}.safetensors")
        files = {f"{name}.safetensors": file_sha256(draft / f"{name}.safetensors") for name in TENSOR_FILES}
        finish_checkpoint(draft, path, {**checkpoint.state, "format": FORMAT, "step": checkpoint.step, "files": files})
    return path


def finish_checkpoint(draft: Path, path: Path, state: Mapping[str, Any]) -> None:
    """Writes the state, which names all files and their checksums, and gives the draft its name."""
    document = {"sha256": hashlib.sha256(_canonical(state)).hexdigest(), "state": state}
    with open(draft / "state.json", "w", encoding="utf-8") as file:
        json.dump(document, file, allow_nan=False, indent=1)
        file.flush()
        os.fsync(file.fileno())
    for name in state["files"]:
        # safetensors makes its files private, whatever the umask.
        shutil.copymode(draft / "state.json", draft / name)
    sync(draft)
    os.rename(draft, path)
    sync(path.parent)


def load_newest(folder: Path, say: Callable[[str], None]) -> Checkpoint | None:
    """Reads the newest intact checkpoint; None without any. `say` is called with a line for each damaged one.

    Raises:
        CheckpointError: all checkpoints are damaged.
    """
    paths = checkpoint_paths(folder)
    for index, path in enumerate(paths):
        try:
            checkpoint = load_checkpoint(path)
        except CheckpointError as error:
            say(f"{error}; " + (f"trying {paths[index + 1].name}" if index + 1 < len(paths) else "there is no earlier one"))
            continue
        if index:
            say(f"continuing from {path.name}")
        return checkpoint
    if paths:
        raise CheckpointError(
            f"{folder}: none of the {len(paths)} checkpoints is intact; restore one, or delete the folder to start again"
        )
    return None


def load_asked(folder: Path, step: int | None = None) -> Checkpoint | None:
    """Reads the checkpoint of a step, or the newest, without falling back to another; None without any checkpoint.

    Raises:
        CheckpointError: it is damaged, or there is none of this step; the message lists the others.
    """
    paths = checkpoint_paths(folder)
    if not paths:
        return None
    path = paths[0] if step is None else path_of_step(folder, step)
    if path not in paths:
        steps = ", ".join(str(_step(one)) for one in paths)
        raise CheckpointError(problem("step", step, f"one of a checkpoint of {folder}: {steps}", "leave it out for the newest"))
    try:
        return load_checkpoint(path)
    except CheckpointError as error:
        if step is None and not path.exists():
            # The run goes on: it has removed this one, after it wrote a newer one.
            return load_asked(folder)
        intact = next((other for other in paths if other != path and _is_intact(other)), None)
        remedy = "" if intact is None else f", or ask for {intact.name} with --step {_step(intact)}"
        raise CheckpointError(f"{error}; restore it{remedy}") from None


def load_checkpoint(path: Path) -> Checkpoint:
    """Reads and verifies one checkpoint, whatever the number of processes that wrote it.

    Raises:
        CheckpointError: a file is missing or differs from its checksum.
    """
    try:
        state = read_state(path)
        for name, sha256 in state["files"].items():
            if file_sha256(path / name) != sha256:
                raise CheckpointError(f"checkpoint {path.name} is damaged: {name} differs from its checksum")
        if state["format"] == FORMAT_SHARDED:
            return _gathered(path, state)
        model, optimizer = (load_file(path / f"{name}.safetensors") for name in TENSOR_FILES)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise CheckpointError(f"checkpoint {path.name} is damaged: {reason}") from None
    return Checkpoint(state["step"], model, optimizer, state)


def read_state(path: Path) -> dict[str, Any]:
    """Reads and verifies what a checkpoint has besides tensors: its format, its step, its files with their checksums, and more.

    Raises:
        CheckpointError: it is missing, damaged, or of another format.
    """
    try:
        document = json_value((path / "state.json").read_bytes())
        state, expected = document["state"], document["sha256"]
        if hashlib.sha256(_canonical(state)).hexdigest() != expected:
            raise CheckpointError(f"checkpoint {path.name} is damaged: state.json differs from its checksum")
        if state["format"] not in (FORMAT, FORMAT_SHARDED):
            allowed = f"{FORMAT} or {FORMAT_SHARDED}"
            raise CheckpointError(f"checkpoint {path.name} has format {state['format']}; must be {allowed}; update twoaxis")
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise CheckpointError(f"checkpoint {path.name} is damaged: {reason}") from None
    return state


def _gathered(path: Path, state: dict[str, Any]) -> Checkpoint:
    """A sharded checkpoint as one process would have written it."""
    from twoaxis.train.parallel.sharded_checkpoint import read_whole

    tensors = read_whole(path)
    optimizer = {name: tensors.pop(name) for name in list(tensors) if "/" in name}
    steps = {f"step/{name}": torch.tensor(float(taken)) for name, taken in state["optimizer_steps"].items()}
    return Checkpoint(state["step"], tensors, {**optimizer, **steps}, state)


def checkpoint_paths(folder: Path) -> list[Path]:
    """The checkpoints of a run, the newest first, damaged ones included."""
    found = [path for path in folder.glob("step-*") if path.is_dir() and path.name.removeprefix("step-").isdecimal()]
    return sorted(found, key=_step, reverse=True)


def newest_step(folder: Path) -> int:
    """The step of the newest checkpoint, damaged or not; 0 without one."""
    return max(map(_step, checkpoint_paths(folder)), default=0)


def set_aside_newer(folder: Path, step: int) -> None:
    """Renames damaged checkpoints after this step, so that the resumed run can write theirs."""
    for path in checkpoint_paths(folder):
        if _step(path) > step:
            path.rename(path.with_name(f"damaged-{path.name}-{uuid.uuid4().hex[:8]}"))


def remove_old(folder: Path, keep: int) -> None:
    """Removes all but the newest checkpoints; one that cannot be removed stays for the next call."""
    for old in checkpoint_paths(folder)[keep:]:
        # Renamed first, so that a partly removed checkpoint is not read as one; the name is that of a draft.
        removed = old.with_name(f".{old.name}.{uuid.uuid4().hex}.tmp")
        with contextlib.suppress(OSError):
            os.rename(old, removed)
            shutil.rmtree(removed, ignore_errors=True)


def _is_intact(path: Path) -> bool:
    try:
        load_checkpoint(path)
    except CheckpointError:
        return False
    return True


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def path_of_step(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step is, or would be."""
    return folder / f"step-{step:08d}"


def _canonical(state: Any) -> bytes:
    return json.dumps(state, sort_keys=True, allow_nan=False).encode()


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class BackgroundWriter:
    """Runs one write at a time in a thread; an error of it is raised by the next call.

    Attributes:
        saved_step: of the newest checkpoint that is complete.
    """

    def __init__(self, saved_step: int) -> None:
        self.saved_step = saved_step
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, write: Callable[[], None], step: int) -> None:
        """Starts a write, when the one before has ended."""
        self.finish()

        device = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None

        def run() -> None:
            try:
                if device is not None:
                    # A thread begins on the first device.
                    torch.accelerator.set_device_index(device)
                write()
                self.saved_step = step
            except BaseException as error:
                self._error = error

        # A run that is ended by force does not wait for it; what it leaves is a draft.
        self._thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self._thread.start()

    def run(self, write: Callable[[], None], step: int) -> None:
        """Writes at once."""
        self.finish()
        write()
        self.saved_step = step

    def finish(self) -> None:
        """Waits for the write that has begun.

        Raises:
            CheckpointError: it has failed.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def abandon(self, seconds: float) -> None:
        """Waits at most so long for the write that has begun, whatever becomes of it."""
        if self._thread is not None:
            self._thread.join(seconds)
