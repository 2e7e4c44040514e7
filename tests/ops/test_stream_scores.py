from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from twoaxis.ops.precision import Impl
from twoaxis.ops.stream_scores import StreamNorm, stream_scores

from .compare import assert_same, assert_within_rounding, normal

EPS = 1e-5
ENGINES: tuple[Impl, ...] = ("fused", "reference")
NORMS: tuple[StreamNorm, ...] = ("layer", "rms")


def loops(weight: Tensor, norm: StreamNorm, m: int, *streams: Tensor) -> Tensor:
    rows = []
    for piece in (piece for stream in streams for piece in stream.chunk(m, -1)):
        x = piece - piece.mean(-1, keepdim=True) if norm == "layer" else piece
        normalised = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()
        rows.append(torch.stack([(normalised * row).sum(-1) for row in weight]))
    return torch.stack(rows)


def scored(norm: StreamNorm, m: int, impl: Impl) -> Callable[..., Tensor]:
    return lambda weight, *streams: stream_scores(streams, weight, norm, EPS, m, impl)


@pytest.mark.parametrize("norm", NORMS)
@given(
    n=st.integers(1, 3), m=st.integers(1, 3), E=st.integers(1, 4), C=st.integers(1, 3), B=st.integers(1, 2), T=st.integers(1, 3)
)
@settings(max_examples=10)
def test_equals_loops(norm: StreamNorm, n: int, m: int, E: int, C: int, B: int, T: int) -> None:
    inputs = [normal(C, E), *(normal(B, T, m * E, seed=1 + k) for k in range(n))]
    for impl in ENGINES:
        assert_same(scored(norm, m, impl), lambda weight, *streams: loops(weight, norm, m, *streams), inputs)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rounds_as_the_reference(norm: StreamNorm, dtype: torch.dtype) -> None:
    streams = [normal(2, 3, 16, seed=2 + k).to(dtype) for k in range(2)]

    def of(impl: Impl) -> Callable[..., Tensor]:
        return lambda weight, *streams: scored(norm, 2, impl)(weight, *streams).to(weight.dtype)

    assert_within_rounding(of("fused"), of("reference"), [normal(3, 8), *streams], dtype)


def test_a_large_mean_does_not_cancel() -> None:
    stream = 1000 + normal(1, 4, 64)
    weight = normal(3, 64, seed=1)
    exact = stream_scores([stream], weight, "layer", EPS)
    got = stream_scores([stream.float()], weight.float(), "layer", EPS)
    of_rounded = stream_scores([stream.float().double()], weight, "layer", EPS)
    assert (got - of_rounded).abs().max() <= 0.02 * exact.abs().max()


@pytest.mark.parametrize("impl", ["fused", "reference"])
def test_a_stream_of_zeros_has_scores_without_an_eps(impl: Impl) -> None:
    scores = stream_scores([torch.zeros(1, 2, 4)], torch.ones(3, 4), "rms", 0.0, 1, impl)
    assert torch.equal(scores, torch.zeros(1, 3, 1, 2))


def test_under_autocast_statistics_stay_wide() -> None:
    streams = [normal(1, 4, 8, seed=k, dtype=torch.float32).requires_grad_() for k in range(2)]
    weight = normal(3, 8, seed=9, dtype=torch.float32)
    expected = stream_scores(streams, weight, "rms", EPS)
    wanted = torch.autograd.grad(expected.sum(), streams, retain_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = stream_scores(streams, weight, "rms", EPS)
        found = torch.autograd.grad(scores.sum(), streams)
    assert torch.equal(scores, expected)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
