"""Results that are made again have the geometry of those that PyTorch computes, and memory of their own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from twoaxis.core import meta_results
from twoaxis.core.measure import Operations, storage_of


def geometry(result: Any) -> Any:
    if isinstance(result, tuple | list):
        return tuple(geometry(each) for each in result)
    bytes_behind = result.untyped_storage().nbytes()
    return result.shape, result.stride(), result.storage_offset(), result.dtype, result.device, bytes_behind


X, Y, N = torch.empty(2, 3, 4, device="meta"), torch.empty(4, device="meta"), torch.empty(5, dtype=torch.int64, device="meta")
OPERATIONS: dict[str, Callable[[], Any]] = {
    "sum of shapes that broadcast": lambda: X + Y,
    "of a transposed tensor": lambda: X.transpose(0, 2) * 2.0,
    "of an expanded tensor": lambda: Y.expand(3, 4) + 1,
    "whole numbers and a whole number": lambda: N + 1,
    "whole numbers and a fraction": lambda: N + 1.0,
    "whole numbers and a truth value": lambda: N * True,
    "in another precision": lambda: X.to(torch.bfloat16),
    "a norm": lambda: torch.linalg.vector_norm(X, dim=-1, dtype=torch.float32),
    "a product": lambda: X @ X.new_empty(4, 7),
    "two results": lambda: X.max(dim=1),
    "several": lambda: torch.cat((X, X), dim=1),
    "a view": lambda: X[:, 1],
    "a division of whole numbers": lambda: N / 2,
    "random": lambda: torch.nn.functional.dropout(X, 0.5),
    "padded": lambda: torch.nn.functional.pad(X, (1, 2)),
}


@pytest.mark.parametrize("run", OPERATIONS.values(), ids=OPERATIONS)
def test_results_are_those_that_pytorch_computes(run: Callable[[], Any]) -> None:
    expected = geometry(run())
    with Operations(None):
        found = [geometry(run()) for _ in range(3)]
    assert found == [expected] * 3


def test_a_result_that_is_made_again_has_its_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meta_results, "_KNOWN", known := {})
    with Operations(None):
        made = [X + Y for _ in range(3)]
    assert len(known) == 1
    assert len({storage_of(each) for each in (X, Y, *made)}) == 5


def test_a_view_that_is_not_declared_shares_memory() -> None:
    with Operations(None):
        made = [torch.ops.aten._unsafe_view(X, [6, 4]) for _ in range(2)]
    assert {storage_of(each) for each in made} == {storage_of(X)}


def test_the_default_precision_counts() -> None:
    with Operations(None):
        single = N / 2
        torch.set_default_dtype(torch.float64)
        try:
            double = N / 2
        finally:
            torch.set_default_dtype(torch.float32)
    assert (single.dtype, double.dtype) == (torch.float32, torch.float64)


def test_tensors_with_memory_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meta_results, "_KNOWN", known := {})
    with Operations(None):
        ones = [torch.ones(2) + torch.full((2,), float(each)) for each in range(2)]
    assert [each.tolist() for each in ones] == [[1.0, 1.0], [2.0, 2.0]]
    assert not known


def test_only_so_many_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meta_results, "MOST", 2)
    monkeypatch.setattr(meta_results, "_KNOWN", known := {})

    def grown(size: int) -> Tensor:
        return torch.empty(size, device="meta") + 1

    with Operations(None):
        assert [grown(size).shape[0] for size in (1, 2, 3, 1)] == [1, 2, 3, 1]
    assert len(known) <= 2
