"""Windowed attention: cost linear in the number of tokens, and no T x T mask in memory."""

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.bounds import Bound
from benchmarks.measure import interleave, table
from twoaxis.core.measure import Operation, Operations
from twoaxis.ops.local_attention import local_attention

BATCH, HEADS, HEAD_DIM, WINDOW = 2, 4, 64, 128


def run(rounds: int) -> list[Bound]:
    """Prints the time per length and returns the bounds on growth and against full attention."""
    lengths = (1024, 2048, 4096, 8192)
    windowed = {f"window {WINDOW}, T={T}": _step(T, WINDOW, 1) for T in lengths}
    windowed |= {f"window {WINDOW}, T={T}, 4 kv-heads": _step(T, WINDOW, HEADS) for T in (1024, 4096)}
    windowed |= {f"full, T={T}, 4 kv-heads": _step(T, None, HEADS) for T in (1024, 4096)}
    print(f"### Windowed attention, [{BATCH}, {HEADS}, T, {HEAD_DIM}], forward and backward\n")
    timings = interleave(windowed, rounds=rounds)
    print(table(timings), "\n")
    ratio = {t.name: t.ratio for t in timings}
    growth = ratio[f"window {WINDOW}, T=8192"] / ratio[f"window {WINDOW}, T=2048"]
    gain = ratio["full, T=4096, 4 kv-heads"] / ratio[f"window {WINDOW}, T=4096, 4 kv-heads"]
    masks = _largest_mask(8192) / _largest_mask(4096)
    return [
        Bound(f"window {WINDOW}: time at T=8192 / at T=2048 (linear is 4)", growth, 4.8),
        Bound(f"T=4096: full attention / window {WINDOW}", gain, 4.0, "at least"),
        Bound(f"window {WINDOW}: largest mask at T=8192 / at T=4096 (T x T would be 4)", masks, 2.0),
    ]


def _step(tokens: int, window: int | None, kv_heads: int) -> Callable[[], None]:
    q, k, v, grad = _inputs(tokens, kv_heads)

    def step() -> None:
        q.grad = k.grad = v.grad = None
        local_attention(q, k, v, window=window).backward(grad)

    return step


def _inputs(tokens: int, kv_heads: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(tokens)
    q, k, v = (torch.randn(BATCH, heads, tokens, HEAD_DIM, generator=generator) for heads in (HEADS, kv_heads, kv_heads))
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), torch.ones_like(q)


def _largest_mask(tokens: int) -> int:
    """Elements of the largest boolean tensor that any operation of a windowed forward pass makes."""
    largest = 0

    def note(operation: Operation) -> None:
        nonlocal largest
        masks = (made.untyped_storage().nbytes() for made in operation.made if made.dtype == torch.bool)
        largest = max(largest, *masks, 0)

    q, k, v, _ = _inputs(tokens, 1)
    with Operations(note):
        local_attention(q, k, v, window=WINDOW)
    return largest
