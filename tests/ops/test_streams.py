from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from twoaxis.core.errors import ConfigError
from twoaxis.ops.streams import mean_streams, mix_pieces, sum_streams

from .compare import assert_same, normal

SIZES = {"B": st.integers(1, 2), "T": st.integers(1, 3)}


def weights(each: str, rows: int, results: int, B: int, T: int, seed: int) -> Tensor:
    return normal(rows, results, *((B, T) if each == "token" else ()), seed=seed)


def loops(residual: Tensor | None, write: Tensor | None, update: Tensor | None, m: int, *streams: Tensor) -> Tensor:
    """Piece by piece, feature by feature."""
    B, T, D = streams[0].shape
    sources = torch.cat(streams, -1).unflatten(-1, (-1, D // m))
    pieces = sources.shape[-2]
    n_results = pieces if residual is None else residual.shape[1]
    parts = None if update is None else update.unflatten(-1, (m, -1))
    per_token = any(weights is not None and weights.ndim == 4 for weights in (residual, write))
    rows = torch.zeros(B, T, n_results, D // m, dtype=sources.dtype)
    for b, t, i in torch.cartesian_prod(torch.arange(B), torch.arange(T), torch.arange(n_results)).tolist():
        at = (i, b, t) if per_token else (i,)
        if residual is None:
            rows[b, t, i] += sources[b, t, i]
        else:
            for j in range(pieces):
                rows[b, t, i] += residual[(j, *at)] * sources[b, t, j]
        if write is not None and parts is not None:
            for f in range(m) if write.shape[0] == m else [i % m]:
                rows[b, t, i] += write[(f if write.shape[0] == m else 0, *at)] * parts[b, t, f]
    return rows.flatten(-2).unflatten(-1, (-1, D)).movedim(-2, 0)


def write_of(m: int, keeps: bool) -> Callable[..., Tensor]:
    """As a function of write weights, update, residual weights unless the streams are kept, and streams."""

    def function(write: Tensor, update: Tensor, *rest: Tensor) -> Tensor:
        residual, streams = (None, rest) if keeps else (rest[0], rest[1:])
        return torch.stack(mix_pieces(streams, update, residual, write, m))

    return function


def write_loops(m: int, keeps: bool) -> Callable[..., Tensor]:
    def function(write: Tensor, update: Tensor, *rest: Tensor) -> Tensor:
        residual, streams = (None, rest) if keeps else (rest[0], rest[1:])
        return loops(residual, write, update, m, *streams)

    return function


def read_of(m: int) -> Callable[..., Tensor]:
    return lambda weights, *streams: torch.stack(mix_pieces(streams, None, weights, None, m))


def inputs_of(each: str, rows: str, n: int, m: int, width: int, B: int, T: int) -> list[Tensor]:
    P = n * m
    write, update = weights(each, 1 if rows == "own" else m, P, B, T, 2), normal(B, T, m * width, seed=3)
    residual = [] if rows == "identity" else [weights(each, P, P, B, T, 1)]
    return [write, update, *residual, *(normal(B, T, m * width, seed=4 + k) for k in range(n))]


@pytest.mark.parametrize("each", ["number", "token"])
@pytest.mark.parametrize("rows", ["all", "own", "identity"])
@given(n=st.integers(1, 3), m=st.integers(1, 3), width=st.integers(1, 2), **SIZES)
@settings(max_examples=8)
def test_equals_loops(each: str, rows: str, n: int, m: int, width: int, B: int, T: int) -> None:
    keeps = rows == "identity"
    assert_same(write_of(m, keeps), write_loops(m, keeps), inputs_of(each, rows, n, m, width, B, T))


@pytest.mark.parametrize("each", ["number", "token"])
@given(n=st.integers(1, 3), m=st.integers(1, 3), reads=st.integers(1, 2), **SIZES)
@settings(max_examples=8)
def test_a_read_equals_loops(each: str, n: int, m: int, reads: int, B: int, T: int) -> None:
    inputs = [weights(each, n * m, reads * m, B, T, 1), *(normal(B, T, 2 * m, seed=3 + k) for k in range(n))]
    assert_same(read_of(m), lambda weights, *streams: loops(weights, None, None, m, *streams), inputs)


def test_the_sum_is_rounded_once() -> None:
    streams = [normal(1, 4, 8, seed=k).bfloat16() for k in range(5)]
    exact = torch.stack(streams).double().sum(0)
    assert torch.equal(sum_streams(streams), exact.bfloat16())
    assert torch.equal(mean_streams(streams), (exact / 5).bfloat16())


@pytest.mark.parametrize("each", ["number", "token"])
def test_is_rounded_once(each: str) -> None:
    update, *streams = (normal(2, 3, 8, seed=2 + k, dtype=torch.bfloat16) for k in range(5))
    residual, write = weights(each, 4, 4, 2, 3, 0).float(), weights(each, 1, 4, 2, 3, 1).float()
    exact = mix_pieces([s.double() for s in streams], update.double(), residual.double(), write.double(), 1)
    for ours, truth in zip(mix_pieces(streams, update, residual, write, 1), exact, strict=True):
        assert (ours != truth.to(torch.bfloat16)).float().mean() < 0.05


def test_rows_are_sources_and_columns_destinations() -> None:
    streams = [torch.full((1, 1, 1), float(10**k)) for k in range(3)]
    cycle = torch.zeros(3, 3)
    cycle[0, 1] = cycle[1, 2] = cycle[2, 0] = 1.0
    results = mix_pieces(streams, torch.ones(1, 1, 1), cycle, torch.zeros(1, 3), 1)
    assert [s.item() for s in results] == [100.0, 1.0, 10.0]


def test_one_tensor_may_be_several_streams() -> None:
    x, y = normal(1, 2, 3).requires_grad_(), normal(1, 2, 3, seed=1)
    residual = normal(2, 2, seed=2)
    torch.stack(mix_pieces((x, x), y, residual, torch.ones(1, 2, dtype=x.dtype), 1)).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, residual.sum().expand_as(x))


def test_mixed_precision_updates() -> None:
    streams = [normal(1, 2, 4, seed=k, dtype=torch.float32) for k in range(2)]
    update = normal(1, 2, 4, seed=2, dtype=torch.bfloat16).requires_grad_()
    results = mix_pieces(streams, update, torch.eye(2), torch.ones(1, 2), 1)
    torch.stack(results).sum().backward()
    assert {s.dtype for s in results} == {torch.float32}
    assert update.grad is not None and update.grad.dtype == torch.bfloat16


@pytest.mark.parametrize(("residual", "write"), [((3, 2), (2,)), ((2, 2), (3,)), (None, (3,))])
def test_weights_for_another_number_of_streams(residual: tuple[int, int] | None, write: tuple[int]) -> None:
    streams = [normal(1, 1, 2), normal(1, 1, 2, seed=1)]
    with pytest.raises(ConfigError, match="for 2 pieces; give one row per source of each result"):
        mix_pieces(streams, normal(1, 1, 2), None if residual is None else torch.ones(residual), torch.ones(1, *write), 1)


def test_the_sum_of_one_stream_is_that_stream() -> None:
    stream = normal(1, 2, 3, dtype=torch.bfloat16)
    assert sum_streams((stream,)) is stream
