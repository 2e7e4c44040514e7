"""What the kernels need on GPUs that are not here, at the block sizes of `launch`: no spills, enough programs, wide loads."""

import importlib.util
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from twoaxis.ops.gpu import launch

if importlib.util.find_spec("triton") is None:
    pytest.skip("without triton", allow_module_level=True)

REGISTERS = 2**16
"""Of a multiprocessor, of all generations since compute capability 7.0."""


class Shape(NamedTuple):
    """A read: sources, width, heads, and what comes with it."""

    n: int
    D: int
    n_heads: int = 1
    capability: int = 90
    options: frozenset[str] = frozenset()


FORWARD = (
    Shape(9, 768, 12),
    Shape(3, 2048, options=frozenset({"stream", "scale"})),
    Shape(9, 4096),
    Shape(9, 4096, 16),
    Shape(25, 7168, capability=100),
    Shape(63, 4096, options=frozenset({"token", "normalised"})),
)
BACKWARD = (
    Shape(9, 768, 12),
    Shape(9, 2048, options=frozenset({"passed"})),
    Shape(9, 4096, options=frozenset({"passed", "statistic", "scale"})),
    Shape(25, 4096, options=frozenset({"token", "normalised"})),
    Shape(25, 7168, options=frozenset({"passed"})),
    Shape(9, 4096, 16, capability=100, options=frozenset({"passed"})),
)


def constants(shape: Shape, blocks: launch.Blocks) -> dict[str, Any]:
    lanes, slots = launch.lanes_of(shape.D, shape.n_heads), launch.power_of_two(shape.n_heads)
    return {
        "WIDTH": shape.D,
        "HEADS": shape.n_heads,
        "SLOTS": slots,
        "LANES": lanes // slots,
        "QUERY_EACH": "token" in shape.options,
        "NORMALISED": "normalised" in shape.options,
        "ROWS": blocks.rows,
        "GROUP": blocks.group,
        "STAGES": blocks.stages,
    }


def arguments(kernel: Any, shape: Shape) -> dict[str, Any]:
    """The types of a call in bfloat16."""
    rows = ("*bf16",) * len(launch.padded(range(shape.n), 0))  # type: ignore[arg-type]
    types: dict[str, Any] = {"sources": rows, "results": rows, "mixed": "*bf16", "grad": "*bf16"}
    types |= dict.fromkeys(("factors", "query", "scores", "log_totals", "grad_query"), "*fp32")
    types |= dict.fromkeys(("n_sources", "n_rows", "wanted", "given"), "i32")
    if "passed" in shape.options:
        types["passed"] = rows
    if "stream" in shape.options:
        types["stream"] = "*bf16"
    if "scale" in shape.options:
        types |= {"scale": "*fp32", "grad_scale": "*fp32"}
    if "statistic" not in shape.options:
        types["grad_factors"] = "*fp32"
    return {name: types.get(name) for name in kernel.arg_names if name.islower()}


@pytest.mark.parametrize("shape", FORWARD, ids=str)
def test_forward(shape: Shape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check("forward", shape, tmp_path, monkeypatch)


@pytest.mark.parametrize("shape", BACKWARD, ids=str)
def test_backward(shape: Shape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check("backward", shape, tmp_path, monkeypatch)


def check(direction: str, shape: Shape, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.ops.gpu.cubin import resources
    from twoaxis.ops.gpu import depth_read_kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    kernel = getattr(depth_read_kernels, f"depth_read_{direction}")
    table = launch.read_blocks if direction == "forward" else launch.read_backward_blocks
    blocks = table(launch.lanes_of(shape.D, shape.n_heads), shape.n)
    found = resources(kernel, arguments(kernel, shape), constants(shape, blocks), blocks.warps, shape.capability)
    print(shape, blocks, found)
    assert found.stack == 0, found
    assert found.narrow == 0 and found.wide > 0, found
    threads = 32 * blocks.warps
    assert REGISTERS // (threads * found.registers) * threads >= 256, found
