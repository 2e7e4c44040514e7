from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from twoaxis.ops import streams as stream_ops
from twoaxis.ops.hyper_read import Activation, ScoreRule, StreamNorm, hyper_read
from twoaxis.ops.precision import Impl

from .compare import assert_same, assert_within_rounding, normal

ENGINES: tuple[Impl, ...] = ("fused", "reference")
NORMS: tuple[StreamNorm, ...] = ("layer", "rms")
ACTIVATIONS: tuple[Activation, ...] = ("tanh", "none")
EPS = 1e-5


def joined(view: Tensor, weights: Tensor, streams: tuple[Tensor, ...]) -> Tensor:
    """Everything that is returned, in one tensor."""
    return torch.cat([t.flatten() for t in (view, weights.to(view.dtype), *streams)])


def loops(rule: ScoreRule, static: Tensor, scale: Tensor, maps: Tensor, offset: Tensor, *streams: Tensor) -> Tensor:
    m = rule.n_fractions
    pieces = [piece for stream in streams for piece in stream.chunk(m, -1)]
    weights = []
    for j, piece in enumerate(pieces):
        x = piece - piece.mean(-1, keepdim=True) if rule.norm == "layer" else piece
        x = x / (x.square().mean(-1, keepdim=True) + rule.eps).sqrt()
        scores = [(x * row).sum(-1) + one for row, one in zip(maps, offset, strict=True)]
        change = [torch.tanh(s) if rule.activation == "tanh" else s for s in scores]
        weights.append(torch.stack([static[j, c] + scale[c] * one for c, one in enumerate(change)]))
    views = [sum(weights[j][r].unsqueeze(-1) * piece for j, piece in enumerate(pieces)) for r in range(m)]
    return joined(torch.cat(views, -1), torch.stack(weights)[:, m:], streams)  # type: ignore[arg-type]


def read(rule: ScoreRule, impl: Impl) -> Callable[..., Tensor]:
    return lambda static, scale, maps, offset, *streams: joined(*hyper_read(streams, static, scale, maps, offset, rule, impl))


def inputs_of(n: int, m: int, E: int, C: int, B: int, T: int) -> list[Tensor]:
    small = [normal(n * m, C), normal(C, seed=1), normal(C, E, seed=2), normal(C, seed=3)]
    return [*small, *(normal(B, T, m * E, seed=4 + k) for k in range(n))]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("norm", NORMS)
@given(
    n=st.integers(1, 3),
    m=st.integers(1, 3),
    E=st.integers(1, 3),
    extra=st.integers(0, 2),
    B=st.integers(1, 2),
    T=st.integers(1, 3),
)
@settings(max_examples=8)
def test_equals_loops(norm: StreamNorm, activation: Activation, n: int, m: int, E: int, extra: int, B: int, T: int) -> None:
    rule = ScoreRule(norm, EPS, activation, m)
    for impl in ENGINES:
        assert_same(read(rule, impl), lambda *given: loops(rule, *given), inputs_of(n, m, E, m + extra, B, T))


def test_a_few_tokens_at_a_time_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    rule, inputs = ScoreRule("layer", EPS, "tanh", 2), inputs_of(2, 2, 3, 5, 2, 7)
    monkeypatch.setattr(stream_ops, "NUMBERS_IN_CACHE", 1)
    assert len(stream_ops.spans(inputs[-1].flatten(0, 1))) > 2
    assert_same(read(rule, "fused"), lambda *given: loops(rule, *given), inputs)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rounds_as_the_reference(norm: StreamNorm, dtype: torch.dtype) -> None:
    rule = ScoreRule(norm, EPS, "tanh", 2)
    assert_within_rounding(read(rule, "fused"), read(rule, "reference"), inputs_of(2, 2, 8, 5, 2, 3), dtype)


def test_without_an_offset() -> None:
    static, scale, maps, offset, *streams = inputs_of(2, 1, 3, 4, 1, 2)
    rule = ScoreRule("rms", EPS)
    expected = hyper_read(streams, static, scale, maps, torch.zeros_like(offset), rule)
    found = hyper_read(streams, static, scale, maps, None, rule)
    assert torch.equal(joined(*found), joined(*expected))


def test_the_streams_are_given_on_and_not_copied() -> None:
    static, scale, maps, offset, *streams = inputs_of(2, 1, 3, 4, 1, 2)
    leaves = [stream.requires_grad_() for stream in streams]
    passed = hyper_read(leaves, static, scale, maps, offset, ScoreRule("rms", EPS)).streams
    assert [t.data_ptr() for t in passed] == [t.data_ptr() for t in leaves]
    assert all(a is not b for a, b in zip(passed, leaves, strict=True))
    for _ in range(2):
        # Only through the streams: the view and the weights have no part in this loss.
        gradients = torch.autograd.grad(passed[0].sum(), leaves, retain_graph=True)
        assert torch.equal(gradients[0], torch.ones_like(leaves[0]))
        assert torch.equal(gradients[1], torch.zeros_like(leaves[1]))


def test_under_autocast_everything_stays_wide() -> None:
    static, scale, maps, offset, *streams = (t.float() for t in inputs_of(2, 1, 8, 4, 1, 4))
    leaves = [stream.requires_grad_() for stream in streams]
    rule = ScoreRule("layer", EPS)
    expected = hyper_read(leaves, static, scale, maps, offset, rule)
    wanted = torch.autograd.grad(joined(*expected).sum(), leaves)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = hyper_read(leaves, static, scale, maps, offset, rule)
        got = torch.autograd.grad(joined(*found).sum(), leaves)
    assert torch.equal(joined(*found), joined(*expected))
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_a_large_mean_does_not_cancel() -> None:
    static, scale, maps, offset, stream = inputs_of(1, 1, 64, 3, 1, 4)
    stream, rule = 1000 + stream, ScoreRule("layer", EPS, "none")
    found = hyper_read([stream.float()], static.float(), scale.float(), maps.float(), offset.float(), rule).weights
    exact = hyper_read([stream.float().double()], static, scale, maps, offset, rule).weights
    assert (found - exact).abs().max() <= 0.02 * exact.abs().max()


@pytest.mark.parametrize("impl", ENGINES)
def test_a_stream_of_zeros_adds_nothing_without_an_eps(impl: Impl) -> None:
    static, scale, maps, _, stream = inputs_of(1, 1, 4, 3, 1, 2)
    read = hyper_read([torch.zeros_like(stream)], static, scale, maps, None, ScoreRule("rms", 0.0), impl)
    assert torch.equal(read.weights, static[:, 1:, None, None].expand(1, 2, 1, 2))
