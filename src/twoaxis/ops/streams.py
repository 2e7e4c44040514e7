"""Writes to parallel residual streams: every new stream is a weighted sum of the old ones and of the update.

Letters: B batch, T position, D width, n streams, m fractions of a stream, P pieces that are read and Q that result: all
fractions of the first stream, then those of the next. Weights are [source, destination]: row j says where piece j goes.
Streams are a sequence of separate tensors: a stack would copy all of them at every write.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from twoaxis.core.errors import ConfigError
from twoaxis.core.views import WeightedSum
from twoaxis.ops.gpu import stream_operator
from twoaxis.ops.precision import Impl, check_impl, outside_autocast, statistics_dtype

NUMBERS_IN_CACHE = 2**17
"""Numbers of one stream in a block, so that all streams of an operator and their gradients stay in the cache of a core."""


@outside_autocast
def mix_pieces(
    streams: Sequence[Float[Tensor, "B T D"]],
    update: Float[Tensor, "B T D"] | None,
    residual: Float[Tensor, "P Q *each"] | None,
    write: Float[Tensor, "rows n *per"] | None,
    n_fractions: int,
    impl: Impl = "fused",
) -> tuple[Float[Tensor, "B T D"], ...]:
    """Mixes the pieces of the streams and adds the update to each of them; without an update it is a read of Q / m results.

    Equation: X'_i = sum_f W_fi y_f + sum_j R_ji X_j over pieces i, j and fractions f; with one row, fraction i mod m of the
              update goes to piece i alone: X'_i = W_0i y_(i mod m) + sum_j R_ji X_j. R = None is the identity. Whole streams
              are m = 1
    Source:   Hyper-Connections, arXiv:2409.19606v3, algorithm 2 (depth connection); Frac-Connections, arXiv:2503.14125
    Shapes:   weights one number each, or one per token ("B T"), in the precision of statistics; each X'_i in the dtype of the
              streams, rounded once
    Engines:  on a GPU kernels, also under `torch.compile`: 16 or 32 bits, whole streams, at most 20 weights per token, such as
              4 x 4 and 4 for the update; on a CPU kernels in C, in compiled graphs only with gradients: float32, whole streams,
              at most 64. They use no atomics, so runs repeat to the bit. Everything else runs in plain PyTorch
    Cost:     flops 2*D/m per weight and token; saves the streams, the update and the weights

    Raises:
        ConfigError: weights for another number of pieces.

    Example:
        >>> streams = torch.ones(1, 1, 1), torch.full((1, 1, 1), 10.0)
        >>> swap = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
        >>> [s.item() for s in mix_pieces(streams, torch.full((1, 1, 1), 0.5), swap, torch.tensor([[2.0, 0.0]]), 1)]
        [11.0, 1.0]
    """
    check_impl(impl)
    plan = _plan(len(streams) * n_fractions, n_fractions, residual, write)
    if impl == "fused" and stream_operator.serves(streams, update, residual, write, n_fractions):
        return stream_operator.mix(streams, update, residual, write)
    given = streams if update is None else (*streams, update)
    return _mixed(plan, residual, write, given)


def sum_streams(streams: Sequence[Float[Tensor, "B T D"]]) -> Float[Tensor, "B T D"]:
    """Returns the sum of the streams, added in float32 and rounded once; saves nothing."""
    return streams[0] if len(streams) == 1 else _total(streams).to(streams[0].dtype)


def mean_streams(streams: Sequence[Float[Tensor, "B T D"]]) -> Float[Tensor, "B T D"]:
    """Returns the mean of the streams, computed in float32 and rounded once; saves nothing."""
    return (_total(streams) / len(streams)).to(streams[0].dtype)


def _total(streams: Sequence[Tensor]) -> Tensor:
    total = streams[0].to(statistics_dtype(streams[0]))
    for stream in streams[1:]:
        total = total + stream
    return total


def stream_sums(
    streams: Sequence[Float[Tensor, "B T D"]],
    update: Float[Tensor, "B T D"],
    residual: Float[Tensor, "P Q *each"] | None,
    write: Float[Tensor, "rows Q *per"],
    next_streams: Sequence[Float[Tensor, "B T D"]],
    n_fractions: int = 1,
) -> tuple[WeightedSum, ...]:
    """Returns the weighted sums of `mix_pieces`: each new stream, of all old pieces and those of the update."""
    n, m = len(streams), n_fractions
    mixing = torch.eye(n * m, dtype=write.dtype, device=write.device) if residual is None else residual
    mixing, write = (x if x.ndim == 4 else x[..., None, None].expand(*x.shape, *update.shape[:2]) for x in (mixing, write))
    sources = tuple(piece.repeat(1, 1, m) for piece in pieces_of((*streams, update), m))
    names = (*piece_names(n, m), *(("update",) if m == 1 else (f"update fraction {f}" for f in range(m))))
    found = []
    for s, made in enumerate(next_streams):
        own = slice(s * m, (s + 1) * m)
        given = write[:, own].movedim(1, -1)
        if write.shape[0] < m:
            # Only fraction f of the update goes to fraction f of a stream.
            given = torch.diag_embed(given[0]).movedim(-2, 0)
        weights = torch.cat((mixing[:, own].movedim(1, -1), given))
        parts = tuple(f"fraction {f}" for f in range(m)) if m > 1 else ()
        found.append(WeightedSum(made, f"stream {s}", names, sources, weights, "mix", parts))
    return tuple(found)


def piece_names(n_streams: int, n_fractions: int) -> tuple[str, ...]:
    """Names the pieces of a state.

    Example:
        >>> piece_names(2, 1), piece_names(1, 2)
        (('stream 0', 'stream 1'), ('fraction 0', 'fraction 1'))
    """
    if n_fractions == 1:
        return tuple(f"stream {s}" for s in range(n_streams))
    own = [f"fraction {f}" for f in range(n_fractions)]
    return tuple(name if n_streams == 1 else f"stream {s} {name}" for s in range(n_streams) for name in own)


class _Term(NamedTuple):
    """A source piece (those of the update are last), the result piece it is added to, and its weight: matrix and row."""

    source: int
    result: int
    matrix: int
    row: int


class _Plan(NamedTuple):
    """All terms of a mixing."""

    n_fractions: int
    n_results: int
    keeps: bool
    terms: tuple[_Term, ...]


def _plan(pieces: int, m: int, residual: Tensor | None, write: Tensor | None) -> _Plan:
    n_results = pieces if residual is None else residual.shape[1]
    fits = residual is None or residual.shape[0] == pieces
    fits = fits and n_results % m == 0 and (write is None or (write.shape[0] in (1, m) and write.shape[1] == n_results))
    if not fits:
        shapes = [None if weights is None else tuple(weights.shape) for weights in (residual, write)]
        raise ConfigError(f"mix_pieces: got weights {shapes} for {pieces} pieces; give one row per source of each result")
    terms = [] if residual is None else [_Term(j, i, 0, j) for j in range(pieces) for i in range(n_results)]
    if write is not None:
        rows = range(write.shape[0])
        own = write.shape[0] < m
        terms += [_Term(pieces + (i % m if own else f), i, 1, f) for f in rows for i in range(n_results)]
    return _Plan(m, n_results, residual is None, tuple(terms))


def pieces_of(tensors: Sequence[Float[Tensor, "*rows D"]], m: int) -> list[Float[Tensor, "*rows E"]]:
    """Returns views of every fraction of every tensor."""
    return list(tensors) if m == 1 else [piece for tensor in tensors for piece in tensor.chunk(m, dim=-1)]


def _mixed(plan: _Plan, residual: Tensor | None, write: Tensor | None, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
    m, dtype = plan.n_fractions, statistics_dtype(given[0])
    matrices = [[row.unbind() for row in matrix.unbind()] for matrix in _widened((residual, write), dtype)]
    sources = pieces_of(given, m)
    totals: list[Tensor | None] = [sources[i].to(dtype) if plan.keeps else None for i in range(plan.n_results)]
    for source, result, matrix, row in plan.terms:
        weight, total = matrices[matrix][row][result], totals[result]
        totals[result] = weight * sources[source] if total is None else torch.addcmul(total, sources[source], weight)
    results = [total.to(given[0].dtype) for total in totals if total is not None]
    return tuple(results[i] if m == 1 else torch.cat(results[i : i + m], dim=-1) for i in range(0, len(results), m))


def spans(rows: Float[Tensor, "N D"], times: int = 1) -> list[slice]:
    """Cuts rows into blocks that fit the cache, so that several operations on a block read memory once.

    Operators with many small steps between few passes over the rows are faster with blocks `times` as long.
    """
    in_cache = torch.get_num_threads() * NUMBERS_IN_CACHE * times
    step = max(1, in_cache // rows.shape[-1]) if rows.device.type == "cpu" else len(rows)
    return [slice(start, min(start + step, len(rows))) for start in range(0, len(rows), step)]


def rows_of(tensors: Sequence[Float[Tensor, "B T D"]]) -> list[Float[Tensor, "N D"]]:
    """Returns every tensor with tokens as rows."""
    return [tensor.reshape(-1, tensor.shape[-1]) for tensor in tensors]


def _widened(matrices: Sequence[Tensor | None], dtype: torch.dtype) -> list[Tensor]:
    """Each in the precision of statistics and with an axis for the features; empty where there is none."""
    # Type promotion ignores a tensor without axes: products with a narrower stream would stay in its precision.
    return [torch.empty(0, 0, 1) if matrix is None else matrix.to(dtype).unsqueeze(-1) for matrix in matrices]
