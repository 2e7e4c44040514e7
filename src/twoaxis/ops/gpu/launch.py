"""When the kernels serve a call, and their block sizes: functions of shapes alone, so that results repeat and nothing is tuned.

Letters: N rows (tokens), D width, H heads, S depth sources.
"""

import contextlib
import importlib.util
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from twoaxis.core.errors import ConfigError
from twoaxis.ops import kernels
from twoaxis.ops.precision import within_plain_forms

LEAST_CAPABILITY = (8, 0)
"""Of a device of NVIDIA: older ones have no bfloat16."""

MOST_SOURCES = 63
"""A set of sources is passed to a kernel as the bits of one int64."""

MOST_LANES = 8192
"""Largest padded row that one program holds in registers."""

SHARED = 2**16
"""Bytes of shared memory for loads ahead: all devices since compute capability 8.0 have 99 KiB for one program."""

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

INSTALLED = importlib.util.find_spec("triton") is not None


def status() -> str:
    """Says whether kernels serve tensors on a GPU, and if not, why: `on`, or `off` with the reason."""
    if not INSTALLED:
        return "off: triton is not installed"
    return "on" if kernels.switched_on() else f"off: {kernels.SWITCH}=off"


def served(x: Tensor) -> bool:
    """Whether kernels compute with tensors like this one: on a GPU, in 16 or 32 bits, switched on and installed."""
    on_device = x.is_cuda or (kernels.INTERPRETED and x.device.type == "cpu")
    usable = INSTALLED and kernels.switched_on() and not within_plain_forms() and not kernels.watched()
    return on_device and x.dtype in DTYPES and usable


def fits(width: int, n_heads: int, n_sources: int) -> bool:
    """Whether a row of this width and so many sources fit the kernels that hold rows in registers."""
    return n_sources <= MOST_SOURCES and lanes_of(width, n_heads) <= MOST_LANES


def lanes_of(width: int, n_heads: int) -> int:
    """Numbers of a row after its heads and their number are padded to powers of two."""
    return power_of_two(n_heads) * power_of_two(width // n_heads)


def power_of_two(n: int) -> int:
    """Returns the smallest power of two that is at least n.

    Example:
        >>> power_of_two(96), power_of_two(1)
        (128, 1)
    """
    return 1 << max(0, n - 1).bit_length()


def padded(tensors: Sequence[Tensor], filler: Tensor) -> tuple[Tensor, ...]:
    """Returns the tensors as a tuple of 4, 8, 16, 32 or 64, so that few variants are compiled; the filler is never read."""
    return (*tensors, *(filler for _ in range(max(4, power_of_two(len(tensors))) - len(tensors))))


class Blocks(NamedTuple):
    """Block sizes of one kernel.

    Attributes:
        rows: that a program holds at a time.
        group: sources loaded at a time.
        warps: of a program.
        stages: of loads in flight.
        programs: at most; 0 starts one for every block of rows.
        queries: that one launch serves.
        columns: of a row that a program holds at a time, where it does not hold whole rows.
    """

    rows: int
    group: int
    warps: int
    stages: int
    programs: int = 0
    queries: int = 1
    columns: int = 0


def start(kernel: Any, blocks: Blocks, n_rows: int, *arguments: Any, **constants: Any) -> None:
    """Starts a kernel over blocks of rows, on the device of its tensors.

    Args:
        kernel: of Triton; its last argument that is no constant is the number of rows.
        blocks: its block sizes.
        n_rows: N.
        arguments: the others, the first a tensor or a tuple of tensors.
        constants: that it is compiled for, block sizes aside.
    """
    first = arguments[0][0] if isinstance(arguments[0], tuple) else arguments[0]
    on_device = contextlib.nullcontext()
    if first.is_cuda:
        check_capability(first.device.index)
        on_device = torch.cuda.device(first.device)
    tile = {"ROWS": blocks.rows, "GROUP": blocks.group, "STAGES": blocks.stages, "COLUMNS": blocks.columns}
    tile = {name: size for name, size in tile.items() if name in kernel.arg_names}
    with on_device:
        kernel[(n_programs(blocks, n_rows),)](*arguments, n_rows, **constants, **tile, num_warps=blocks.warps)


def n_programs(blocks: Blocks, n_rows: int) -> int:
    """Programs that are started for so many rows."""
    n_blocks = -(-n_rows // blocks.rows)
    return min(n_blocks, blocks.programs) if blocks.programs else n_blocks


def read_blocks(lanes: int, n_sources: int, itemsize: int) -> Blocks:
    """The blocks of a depth read; not measured on a GPU yet.

    Args:
        lanes: of a padded row.
        n_sources: S.
        itemsize: bytes of a number of a source.
    """
    rows, warps = _rows_and_warps(lanes)
    return Blocks(rows, _group(4, n_sources, rows * lanes * itemsize, SHARED), warps, 2)


def read_backward_blocks(lanes: int, n_sources: int, itemsize: int) -> Blocks:
    """The blocks of the backward pass of a depth read, with arguments as of `read_blocks`; not measured on a GPU yet.

    The number of programs does not depend on the device, so that sums over rows are the same on all. More of them than a device
    holds at a time would only push what is read twice out of the second-level cache.
    """
    rows, warps = _rows_and_warps(lanes)
    # Half of the shared memory is for gradients of later readers.
    group = _group(2, n_sources, rows * lanes * itemsize, SHARED // 2)
    return Blocks(rows, group, warps, 2, _programs(warps))


def row_blocks(lanes: int) -> Blocks:
    """The blocks of what takes tensors one by one, in whole rows: norms and delta writes."""
    rows, warps = _rows_and_warps(lanes)
    return Blocks(rows, 1, warps, 1)


def early_blocks(lanes: int, n_sources: int, itemsize: int) -> Blocks:
    """The blocks of an early read, whose queries have tiles of their own: half as much of a row per thread."""
    rows = max(1, min(16, 256 // lanes))
    group = _group(4 if lanes < MOST_LANES else 2, n_sources, rows * lanes * itemsize, SHARED)
    return Blocks(rows, group, max(1, min(16, rows * lanes // 256)), 2, queries=2)


def early_backward_blocks(lanes: int, n_sources: int, itemsize: int) -> Blocks:
    """The blocks of its backward pass. The widest rows leave registers for one query: each launch adds to the one before."""
    rows, _, warps, stages, *_ = early_blocks(lanes, n_sources, itemsize)
    group = _group(2, n_sources, rows * lanes * itemsize, SHARED // 2)
    return Blocks(rows, group, warps, stages, _programs(warps), 2 if lanes < MOST_LANES else 1)


def _group(most: int, n_sources: int, source_bytes: int, shared_bytes: int) -> int:
    """Sources loaded at a time: no more than there are, and than fit into this much shared memory."""
    return max(1, min(most, power_of_two(n_sources), shared_bytes // source_bytes))


def mix_blocks(width: int) -> Blocks:
    """The blocks of a mixing of streams, whose programs go through their rows in columns; not measured on a GPU yet."""
    columns = min(1024, max(128, power_of_two(width)))
    return Blocks(1024 // columns, 1, 4, 1, columns=columns)


def mix_backward_blocks(width: int) -> Blocks:
    """The blocks of its backward pass: four numbers of each of at most twenty sums per thread.

    One warp needs no barriers for its sums. The number of programs does not depend on the device, so that sums over rows are
    the same on all.
    """
    columns = min(128, max(32, power_of_two(width)))
    return Blocks(128 // columns, 1, 1, 1, 2048, columns=columns)


def sinkhorn_blocks() -> Blocks:
    """The blocks of Sinkhorn normalisation: one matrix per thread, in both directions; not measured on a GPU yet."""
    return Blocks(64, 1, 2, 1)


def _rows_and_warps(lanes: int) -> tuple[int, int]:
    """A warp holds 512 numbers of a source, so that tiles of narrow rows need neither barriers nor copies."""
    rows = max(1, min(16, 512 // lanes))
    return rows, max(1, rows * lanes // 512)


def _programs(warps: int) -> int:
    """What 128 multiprocessors hold at a time, 16 warps each."""
    return 2048 // warps


@cache
def check_capability(index: int) -> None:
    """Rejects a device that is too old for the kernels.

    Raises:
        ConfigError: an older device of NVIDIA.
    """
    found = torch.cuda.get_device_capability(index)
    if torch.version.hip is None and found < LEAST_CAPABILITY:
        raise ConfigError(
            f"kernels: {torch.cuda.get_device_name(index)} has compute capability {found[0]}.{found[1]}: must be at least "
            f"{LEAST_CAPABILITY[0]}.{LEAST_CAPABILITY[1]}; set {kernels.SWITCH}=off"
        )
