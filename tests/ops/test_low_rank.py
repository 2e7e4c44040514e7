import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from twoaxis.core.errors import ConfigError
from twoaxis.ops.low_rank import low_rank_sum

from .compare import assert_same, normal


def tensors(S: int, M: int, B: int, T: int, D: int, R: int) -> list[Tensor]:
    small = [normal(2, seed=1), normal(S, seed=2), normal(M * R, D, seed=3), normal(D, M * R, seed=4)]
    return [normal(B, T, D, seed=5), *small, *(normal(B, T, D, seed=6 + s) for s in range(S))]


def summed(n_maps: int):  # type: ignore[no-untyped-def]
    def function(update: Tensor, scales: Tensor, weights: Tensor, down: Tensor, up: Tensor, *sources: Tensor) -> Tensor:
        return low_rank_sum(update, sources, scales, weights, down, up, n_maps)

    return function


def written_out(n_maps: int):  # type: ignore[no-untyped-def]
    def function(update: Tensor, scales: Tensor, weights: Tensor, down: Tensor, up: Tensor, *sources: Tensor) -> Tensor:
        total = scales[0] * update + scales[1] * sources[-1]
        R = down.shape[0] // n_maps
        for j, x in enumerate(sources):
            rows = slice(j % n_maps * R, (j % n_maps + 1) * R)
            total = total + weights[j] * (x @ (up[:, rows] @ down[rows]).T)
        return total

    return function


@given(
    S=st.integers(1, 3),
    separate=st.booleans(),
    B=st.integers(1, 2),
    T=st.integers(1, 2),
    D=st.integers(1, 5),
    R=st.integers(1, 3),
)
@settings(max_examples=15)
def test_equals_the_equation(S: int, separate: bool, B: int, T: int, D: int, R: int) -> None:
    M = S if separate else 1
    assert_same(summed(M), written_out(M), tensors(S, M, B, T, D, R))


def test_scales_without_gradient_keep_no_update() -> None:
    update, scales, weights, down, up, x = tensors(1, 1, 1, 2, 3, 2)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        low_rank_sum(update.requires_grad_(), [x], scales, weights, down.requires_grad_(), up)
    assert all(t.data_ptr() != update.data_ptr() for t in kept)


@pytest.mark.parametrize(("n_weights", "n_maps"), [(1, 1), (2, 3)])
def test_numbers_that_do_not_fit(n_weights: int, n_maps: int) -> None:
    update, scales, _, down, up, *sources = tensors(2, 1, 1, 1, 2, 3)
    with pytest.raises(ConfigError, match=f"got 2 sources, {n_weights} weights and {n_maps} maps; give one weight per"):
        low_rank_sum(update, sources, scales, torch.ones(n_weights), down, up, n_maps)
