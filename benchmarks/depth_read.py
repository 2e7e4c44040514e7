"""The depth read against the memory floor, and what it saves for the backward pass."""

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.bounds import Bound, over_first
from benchmarks.measure import interleave, table
from twoaxis.ops.depth_read import depth_read
from twoaxis.ops.norm import inverse_rms
from twoaxis.ops.precision import Impl

BATCH, TOKENS, WIDTH, EPS = 4, 512, 256, 1e-6
MIB = 2**20


def run(rounds: int) -> list[Bound]:
    """Prints time per number of sources and saved bytes, and returns the bounds at 24 sources."""
    # From then on the allocator keeps what a step frees, as it does for models, whose larger tensors have been freed before.
    torch.empty(31 * MIB, dtype=torch.uint8)
    bounds = []
    for n in (4, 24):
        sources, query, grad = _inputs(n)
        floor = _memory_floor(n)
        candidates: dict[str, Callable[[], object]] = {
            "memory floor": floor,
            "fused": _step(sources, query, grad, _read("fused")),
            "fused compiled": _step(sources, query, grad, torch.compile(_read("fused"), dynamic=False)),
            "reference": _step(sources, query, grad, _read("reference")),
        }
        timings = interleave(candidates, rounds=rounds)
        print(f"### Depth read, {n} sources of [{BATCH}, {TOKENS}, {WIDTH}], norms included, forward and backward\n")
        print(table(timings), f"\n\nsaved for backward: {_saved_bytes(sources, query) / MIB:.1f} MiB\n")
        if n == 24:
            bounds.append(over_first("depth read, 24 sources, fused / memory floor", timings, 2.5, "fused"))
            bounds.append(over_first("depth read, 24 sources, fused compiled / memory floor", timings, 2.5, "fused compiled"))
    few, many = (_saved_bytes(*_inputs(n)[:2]) for n in (4, 24))
    bounds.append(Bound("depth read, saved bytes at 24 sources / at 4", many / few, 24 / 4 + 0.1))
    return bounds


def _inputs(n: int) -> tuple[list[Tensor], Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n)
    sources = [torch.randn(BATCH, TOKENS, WIDTH, generator=generator).requires_grad_() for _ in range(n)]
    return sources, torch.zeros(WIDTH).requires_grad_(), torch.randn(BATCH, TOKENS, WIDTH, generator=generator)


def _read(impl: Impl) -> Callable[[list[Tensor], Tensor], Tensor]:
    def read(sources: list[Tensor], query: Tensor) -> Tensor:
        # Statistics without gradients of their own: with a single read, it passes on what flows through them.
        return depth_read(sources, [inverse_rms(v, EPS) for v in sources], query, impl)

    return read


def _step(
    sources: list[Tensor], query: Tensor, grad: Tensor, read: Callable[[list[Tensor], Tensor], Tensor]
) -> Callable[[], None]:
    def step() -> None:
        for tensor in (*sources, query):
            tensor.grad = None
        read(sources, query).backward(grad)

    return step


def _memory_floor(n: int) -> Callable[[], None]:
    """Copies as many bytes as a perfect forward and backward pass must move, between arrays larger than the caches.

    Forward reads n sources and writes one result; backward reads n sources and the gradient and writes n gradients.
    """
    floats = (3 * n + 2) * BATCH * TOKENS * WIDTH
    # Each copied number is one read and one write.
    source, target = torch.zeros(max(floats // 2, 32 * MIB)), torch.zeros(max(floats // 2, 32 * MIB))

    def copy() -> None:
        target[: floats // 2].copy_(source[: floats // 2])

    return copy


def _saved_bytes(sources: list[Tensor], query: Tensor) -> int:
    storages: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = _read("fused")(sources, query)
    del result
    return sum(storages.values())
