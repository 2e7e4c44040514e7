"""The measure of traffic itself: every number once, a slice as a slice, views and shapes for nothing."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from twoaxis.core.measure import Operations, Reads, new_bytes, storages_of

BYTES = 8
CASES: dict[str, tuple[Callable[[Tensor], object], int]] = {
    "all": (lambda x: x + 1, 12),
    "twice": (lambda x: x * x + x.sum(), 12),
    "a slice": (lambda x: x[1:, :2] + 1, 4),
    "two slices that overlap": (lambda x: x[:2].sum() + x[1:].sum(), 12),
    "one row, seen often": (lambda x: x[:1].expand(5, 4) * 2, 4),
    "a number on the host": (lambda x: x[0, 0].item(), 1),
    "a transposed product": (lambda x: x[:, :1].T @ x[:, 1:], 12),
    "a view": (lambda x: x.view(4, 3)[1:].transpose(0, 1), 0),
    "a shape": (lambda x: torch.zeros_like(x) + x.new_empty(3, 4).fill_(1.0), 0),
    "what no one asked for": (lambda x: torch.ones(3, 4) + 1, 0),
}


@pytest.mark.parametrize("name", CASES)
def test_reads(name: str) -> None:
    run, numbers = CASES[name]
    x = torch.arange(12.0, dtype=torch.float64).view(3, 4)
    reads = Reads(storages_of(x))
    with Operations(reads.note):
        run(x)
    assert reads.touched.bytes() == numbers * BYTES


def test_writes_are_what_is_new() -> None:
    x = torch.zeros(3, 4, dtype=torch.float64)
    made = x + 1
    assert new_bytes((made, x, x[1:]), x) == 12 * BYTES
    assert new_bytes((made[:1], (made[1:], made)), x) == 12 * BYTES
    assert new_bytes(made[0, :2].bfloat16(), x) == 2 * 2
