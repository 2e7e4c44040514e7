"""Checkpoints that every rank writes its shards of, and that any number of ranks reads: torch.distributed.checkpoint.

The files are safetensors with the place of each shard in their header; nothing is pickled. A folder appears whole or not at
all: the first rank makes the draft, adds the checksums of all files, and renames it.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from twoaxis.core.errors import CheckpointError, system_reason
from twoaxis.core.files import draft_of
from twoaxis.train.checkpoint import (
    FORMAT_SHARDED,
    checkpoint_paths,
    file_sha256,
    finish_checkpoint,
    path_of_step,
    read_state,
    remove_old,
)
from twoaxis.train.parallel.ranks import Ranks

FILE_BYTES = 2**26
"""About the largest file that a rank writes; each is held in memory twice while it is written."""


def save_shards(
    folder: Path, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any], keep: int, ranks: Ranks
) -> None:
    """Writes `folder/step-00001234`, then removes all but the newest `keep` checkpoints; every rank calls it.

    Args:
        folder: of the checkpoints, in a file system that all ranks share.
        step: steps taken.
        tensors: this rank's shards by name, with at least one dimension each.
        state: other JSON-ready data, of the first rank.
        keep: how many to keep.
        ranks: of the run.

    Raises:
        CheckpointError: the disk is full or cannot be written, on any rank; earlier checkpoints are unchanged.
    """
    path = path_of_step(folder, step)
    with ExitStack() as stack:

        def begin() -> str:
            draft = stack.enter_context(draft_of(path))
            draft.mkdir()
            return draft.name

        try:
            draft = folder / ranks.first(_as_checkpoint_error(folder, step, begin))
            writer = _Writer(str(draft), _files(tensors, ranks), save_distributed=True)
            dcp.save(dict(tensors), storage_writer=writer, process_group=ranks.group)
        except CheckpointException as error:
            raise CheckpointError(_unwritten(folder, step, _reason(error))) from None
        own = f"shard-{ranks.rank + 1:05d}-*.safetensors"
        sums = ranks.each(_as_checkpoint_error(folder, step, lambda: {one.name: file_sha256(one) for one in draft.glob(own)}))
        files = {name: digest for found in ranks.gather(sums) for name, digest in found.items()}
        document = {**state, "format": FORMAT_SHARDED, "step": step, "files": files}
        ranks.first(_as_checkpoint_error(folder, step, lambda: finish_checkpoint(draft, path, document)))
    ranks.first(lambda: remove_old(folder, keep))


class _Writer(HuggingFaceStorageWriter):
    """Writes the second and later parts of a tensor into files of their own, since a file has one tensor of a name."""

    def _split_by_storage_plan(self, storage_plan: dict[str, int] | None, items: list[Any]) -> dict[int, list[Any]]:
        assert storage_plan is not None
        files, parts = max(storage_plan.values()), Counter[str]()
        found: dict[int, list[Any]] = {}
        for item in items:
            name = item.index.fqn
            found.setdefault(storage_plan[name] + files * parts[name], []).append(item)
            parts[name] += 1
        return found


def newest_intact(folder: Path, ranks: Ranks, say: Callable[[str], None]) -> tuple[Path, dict[str, Any]] | None:
    """The newest intact checkpoint of any format, and its state; the ranks divide its files to verify them.

    Raises:
        CheckpointError: all checkpoints are damaged.
    """
    names = ranks.first(lambda: [path.name for path in checkpoint_paths(folder)])
    for index, name in enumerate(names):
        problems = [found for found in ranks.gather(_damage(folder / name, ranks)) if found]
        if not problems:
            if index:
                say(f"continuing from {name}")
            return folder / name, read_state(folder / name)
        say(f"{problems[0]}; " + (f"trying {names[index + 1]}" if index + 1 < len(names) else "there is no earlier one"))
    if names:
        raise CheckpointError(
            f"{folder}: none of the {len(names)} checkpoints is intact; restore one, or delete the folder to start again"
        )
    return None


def stored_tensors(path: Path) -> dict[str, TensorStorageMetadata]:
    """The whole shape and dtype of every tensor in a checkpoint of any format, by name."""
    found = HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata
    return {name: one for name, one in found.items() if isinstance(one, TensorStorageMetadata)}


def read_into(path: Path, tensors: Mapping[str, Tensor], alone: bool = False) -> None:
    """Reads tensors by name into memory that is there: whole ones, or the shards of this rank; only what it needs is read."""
    with warnings.catch_warnings():
        # It is said of one process that it is one.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        try:
            dcp.load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(path)), no_dist=alone)
        except CheckpointException as error:
            raise CheckpointError(f"checkpoint {path.name} is damaged: {_reason(error)}") from None


def read_whole(path: Path) -> dict[str, Tensor]:
    """Reads all tensors of a checkpoint into one process."""
    tensors = {name: torch.empty(one.size, dtype=one.properties.dtype) for name, one in stored_tensors(path).items()}
    read_into(path, tensors, alone=True)
    return tensors


def read_scalars(path: Path) -> dict[str, Tensor]:
    """The tensors without a dimension in a checkpoint of one process: the steps of its optimizer, by name."""
    file = path / "optimizer.safetensors"
    if not file.exists():
        return {}
    with safe_open(str(file), "pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys() if not opened.get_slice(name).get_shape()}  # noqa: SIM118


def _files(tensors: Mapping[str, Tensor], ranks: Ranks) -> dict[str, int]:
    """The number of the file for each tensor of any rank, from 1, by the bytes that a rank writes of it."""
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
    whole = {name: size for found in ranks.gather(sizes) for name, size in found.items()}
    numbers, filled = {}, 0
    for name, size in whole.items():
        filled += size // ranks.count
        numbers[name] = 1 + filled // FILE_BYTES
    return numbers


def _damage(path: Path, ranks: Ranks) -> str:
    """What is wrong with the state or with this rank's part of the files; "" when nothing is."""
    try:
        files = sorted(read_state(path)["files"].items())
        for name, expected in files[ranks.rank :: ranks.count]:
            if file_sha256(path / name) != expected:
                return f"checkpoint {path.name} is damaged: {name} differs from its checksum"
    except CheckpointError as error:
        return str(error)
    except OSError as error:
        return f"checkpoint {path.name} is damaged: {error.strerror or error}"
    return ""


def _as_checkpoint_error(folder: Path, step: int, work: Callable[[], Any]) -> Callable[[], Any]:
    def wrapped() -> Any:
        try:
            return work()
        except (OSError, SafetensorError) as error:
            raise CheckpointError(_unwritten(folder, step, system_reason(error) or str(error))) from None

    return wrapped


def _unwritten(folder: Path, step: int, reason: str) -> str:
    return (
        f"checkpoint of step {step}: cannot be written to {folder} ({reason}); earlier checkpoints are intact; free space "
        "there and run again to resume"
    )


def _reason(error: CheckpointException) -> str:
    inner = next(iter(error.failures.values()), None)
    found = inner[0] if isinstance(inner, tuple) else inner
    return (system_reason(found) if isinstance(found, BaseException) else None) or str(found or error).splitlines()[0]
