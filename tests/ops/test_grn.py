from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from twoaxis.core.errors import ConfigError
from twoaxis.ops.grn import ACTIVATIONS, grn
from twoaxis.ops.mix import mix

from .compare import LargestTensor, assert_same, assert_within_rounding, normal

EPS = 1e-3


def tensors(C: int, S: int, R: int, B: int, T: int, D: int) -> list[Tensor]:
    small = [normal(C, S, D, seed=1), normal(C, R, D, seed=2), normal(D, seed=3)]
    return [*small, *(normal(B, T, D, seed=4 + s) for s in range(S))]


def read(impl: Any, activation: Any, normalises: bool = True) -> Any:
    def function(bias: Tensor, weight: Tensor, gain: Tensor, *sources: Tensor) -> Tensor:
        # The gain has a gradient in any case, so that all inputs do.
        result = grn(sources, bias, weight, activation, gain if normalises else None, EPS, impl)
        return torch.stack(result) + 0 * gain.sum().to(sources[0].dtype)

    return function


def loops(activation: Any, normalises: bool = True) -> Any:
    def function(bias: Tensor, weight: Tensor, gain: Tensor, *sources: Tensor) -> Tensor:
        ways = []
        for c in range(bias.shape[0]):
            total = torch.zeros_like(sources[0]) + 0 * gain.sum()
            for j, v in enumerate(sources):
                scored = v * torch.rsqrt(v.square().mean(-1, keepdim=True) + EPS) * gain if normalises else v
                s = ACTIVATIONS[activation]((scored * weight[c, min(j, weight.shape[1] - 1)]).sum(-1, keepdim=True))
                total = total + (bias[c, j] + s) * v
            ways.append(total)
        return torch.stack(ways)

    return function


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize("impl", ["fused", "reference"])
@given(
    C=st.sampled_from([1, 3]),
    S=st.integers(1, 3),
    per_source=st.booleans(),
    normalises=st.booleans(),
    B=st.integers(1, 2),
    T=st.integers(1, 2),
    D=st.integers(1, 5),
)
@settings(max_examples=10)
def test_equals_loops(
    impl: str, activation: str, C: int, S: int, per_source: bool, normalises: bool, B: int, T: int, D: int
) -> None:
    inputs = tensors(C, S, S if per_source else 1, B, T, D)
    assert_same(read(impl, activation, normalises), loops(activation, normalises), inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("normalises", [True, False])
def test_rounds_once(dtype: torch.dtype, normalises: bool) -> None:
    inputs = tensors(3, 5, 5, 2, 3, 8)
    assert_within_rounding(read("fused", "gelu", normalises), read("reference", "gelu", normalises), inputs, dtype)


def test_weights_of_zero_leave_the_biases() -> None:
    bias, weight, _, *sources = tensors(2, 3, 1, 2, 3, 5)
    for activation in ACTIVATIONS:
        for ours, theirs in zip(grn(sources, bias, 0 * weight, activation), mix(sources, bias), strict=True):
            assert torch.equal(ours, theirs)


def test_relu_is_not_around_the_bias() -> None:
    v = torch.ones(1, 1, 2, dtype=torch.float64)
    assert grn([v], -2 * torch.ones(1, 1, 2).double(), 0.25 * torch.ones(1, 1, 2).double(), "relu")[0].tolist() == [
        [[-1.5, -1.5]]
    ]


def test_never_makes_more_than_one_source_of_numbers() -> None:
    bias, weight, gain, *sources = (t.requires_grad_() for t in tensors(3, 6, 1, 2, 16, 64))
    with LargestTensor() as seen:
        sum(y.sum() for y in grn(sources, bias, weight, "gelu", gain, EPS)).backward()  # type: ignore[union-attr]
    assert seen.largest == sources[0].numel()


@pytest.mark.parametrize(("biases", "vectors"), [(1, 1), (2, 3)])
def test_weights_for_another_number_of_sources(biases: int, vectors: int) -> None:
    with pytest.raises(ConfigError, match=f"got 2 sources, biases for {biases} and score weights for {vectors}"):
        grn([normal(1, 1, 2)] * 2, torch.ones(1, biases, 2), torch.ones(1, vectors, 2), "relu")
