from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from twoaxis.ops import streams as stream_ops
from twoaxis.ops.precision import Impl
from twoaxis.ops.scores import stream_scores

from .compare import assert_same, assert_within_rounding, normal

EPS = 1e-5
ENGINES: tuple[Impl, ...] = ("fused", "reference")


def loops(weight: Tensor, *streams: Tensor) -> Tensor:
    rows = []
    for x in streams:
        normalised = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()
        rows.append(torch.stack([(normalised * row).sum(-1) for row in weight]))
    return torch.stack(rows)


def scored(impl: Impl) -> Callable[..., Tensor]:
    return lambda weight, *streams: stream_scores(streams, weight, EPS, impl)


@given(n=st.integers(1, 3), D=st.integers(1, 4), C=st.integers(1, 3), B=st.integers(1, 2), T=st.integers(1, 3))
@settings(max_examples=10)
def test_equals_loops(n: int, D: int, C: int, B: int, T: int) -> None:
    inputs = [normal(C, D), *(normal(B, T, D, seed=1 + k) for k in range(n))]
    for impl in ENGINES:
        assert_same(scored(impl), loops, inputs)


def test_a_few_tokens_at_a_time_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_ops, "NUMBERS_IN_CACHE", 1)
    assert_same(scored("fused"), loops, [normal(3, 4), normal(2, 7, 4, seed=1), normal(2, 7, 4, seed=2)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rounds_as_the_reference(dtype: torch.dtype) -> None:
    streams = [normal(2, 3, 16, seed=2 + k).to(dtype) for k in range(2)]

    def of(impl: Impl) -> Callable[..., Tensor]:
        return lambda weight, *streams: scored(impl)(weight, *streams).to(weight.dtype)

    assert_within_rounding(of("fused"), of("reference"), [normal(3, 16), *streams], dtype)


@pytest.mark.parametrize("impl", ["fused", "reference"])
def test_a_stream_of_zeros_has_scores_without_an_eps(impl: Impl) -> None:
    scores = stream_scores([torch.zeros(1, 2, 4)], torch.ones(3, 4), 0.0, impl)
    assert torch.equal(scores, torch.zeros(1, 3, 1, 2))


def test_under_autocast_statistics_stay_wide() -> None:
    streams = [normal(1, 4, 8, seed=k, dtype=torch.float32).requires_grad_() for k in range(2)]
    weight = normal(3, 8, seed=9, dtype=torch.float32)
    expected = stream_scores(streams, weight, EPS)
    wanted = torch.autograd.grad(expected.sum(), streams, retain_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = stream_scores(streams, weight, EPS)
        found = torch.autograd.grad(scores.sum(), streams)
    assert torch.equal(scores, expected)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
