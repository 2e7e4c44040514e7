from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from twoaxis.core.errors import ConfigError
from twoaxis.ops.precision import Impl
from twoaxis.ops.scores import joint_scores

from .compare import assert_same, assert_within_rounding, normal

EPS = 1e-5
ENGINES: tuple[Impl, ...] = ("fused", "reference")


def side_by_side(weight: Tensor, *streams: Tensor) -> Tensor:
    joint = torch.cat(streams, dim=-1)
    normalised = joint / (joint.square().mean(-1, keepdim=True) + EPS).sqrt()
    return torch.stack([(normalised * row).sum(-1) for row in weight])


def scored(impl: Impl) -> Callable[..., Tensor]:
    return lambda weight, *streams: joint_scores(streams, weight, EPS, impl)


@given(n=st.integers(1, 4), C=st.integers(1, 5), B=st.integers(1, 2), T=st.integers(1, 3), D=st.integers(1, 5))
@settings(max_examples=20)
def test_equals_the_streams_side_by_side(n: int, C: int, B: int, T: int, D: int) -> None:
    inputs = [normal(C, n * D), *(normal(B, T, D, seed=1 + j) for j in range(n))]
    for impl in ENGINES:
        assert_same(scored(impl), side_by_side, inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rounds_as_the_reference(dtype: torch.dtype) -> None:
    def of(impl: Impl) -> Callable[..., Tensor]:
        return lambda weight, *streams: scored(impl)(weight, *streams).to(weight.dtype)

    inputs = [normal(3, 32), *(normal(2, 3, 16, seed=2 + j) for j in range(2))]
    assert_within_rounding(of("fused"), of("reference"), inputs, dtype)


def test_a_stream_without_gradient_leaves_the_others_theirs() -> None:
    streams = [normal(1, 2, 3, seed=j) for j in range(2)]
    streams[1].requires_grad_()
    joint_scores(streams, normal(4, 6), EPS).sum().backward()
    assert streams[0].grad is None and streams[1].grad is not None


def test_under_autocast_statistics_stay_wide() -> None:
    streams = [normal(1, 4, 8, seed=j, dtype=torch.float32).requires_grad_() for j in range(2)]
    weight = normal(3, 16, seed=9, dtype=torch.float32)
    expected = joint_scores(streams, weight, EPS)
    wanted = torch.autograd.grad(expected.sum(), streams, retain_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = joint_scores(streams, weight, EPS)
        found = torch.autograd.grad(scores.sum(), streams)
    assert torch.equal(scores, expected)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_weight_for_another_number_of_streams() -> None:
    with pytest.raises(ConfigError, match="width 3 for 2 streams of width 3; give n\\*D columns"):
        joint_scores([normal(1, 1, 3)] * 2, normal(1, 3), EPS)
