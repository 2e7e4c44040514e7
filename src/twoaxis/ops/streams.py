"""Writes to parallel residual streams: every new stream is a weighted sum of the old ones and of the update.

Letters: B batch, T position, D width, n streams, m fractions of a stream, P pieces that are read and Q that result: all
fractions of the first stream, then those of the next. Weights are [source, destination]: row j says where piece j goes.
Streams are a sequence of separate tensors: a stack would copy all of them at every write.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from twoaxis.core.errors import ConfigError
from twoaxis.core.views import WeightedSum
from twoaxis.ops.gpu import stream_operator
from twoaxis.ops.precision import Impl, outside_autocast, runs_plain, statistics_dtype

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
              4 x 4 and 4 for the update; they use no atomics, so runs repeat to the bit. Everything else runs in torch's engine
    Cost:     flops 2*D/m per weight and token; saves the streams, the update and the weights

    Raises:
        ConfigError: weights for another number of pieces.

    Example:
        >>> streams = torch.ones(1, 1, 1), torch.full((1, 1, 1), 10.0)
        >>> swap = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
        >>> [s.item() for s in mix_pieces(streams, torch.full((1, 1, 1), 0.5), swap, torch.tensor([[2.0, 0.0]]), 1)]
        [11.0, 1.0]
    """
    plan = _plan(len(streams) * n_fractions, n_fractions, residual, write)
    if impl == "fused" and stream_operator.serves(streams, update, residual, write, n_fractions):
        return stream_operator.mix(streams, update, residual, write)
    given = streams if update is None else (*streams, update)
    if runs_plain(impl):
        return _plain(plan, residual, write, given)
    return _MixPieces.apply(plan, residual, write, *given)


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
    """All terms of a mixing, the same for the fused engine and the reference."""

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


def _plain(plan: _Plan, residual: Tensor | None, write: Tensor | None, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
    m, dtype = plan.n_fractions, statistics_dtype(given[0])
    matrices, sources = _widened((residual, write), dtype), pieces_of(given, m)
    totals: list[Tensor | None] = [sources[i].to(dtype) if plan.keeps else None for i in range(plan.n_results)]
    for source, result, matrix, row in plan.terms:
        term, total = matrices[matrix][row, result] * sources[source], totals[result]
        totals[result] = term if total is None else total + term
    results = [total.to(given[0].dtype) for total in totals if total is not None]
    return tuple(results[i] if m == 1 else torch.cat(results[i : i + m], dim=-1) for i in range(0, len(results), m))


class _MixPieces(torch.autograd.Function):
    """One buffer per result in the forward pass, one buffer per source in the backward pass."""

    @staticmethod
    def forward(ctx: Any, plan: _Plan, residual: Tensor | None, write: Tensor | None, *given: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(residual, write, *given)
        ctx.plan = plan
        dtype = statistics_dtype(given[0])
        matrices = _flat_weights((residual, write), dtype)
        results = [torch.empty_like(given[0], dtype=dtype) for _ in range(plan.n_results // plan.n_fractions)]
        flat, flat_results = rows_of(given), rows_of(results)
        for span in spans(flat[0]):
            sources, totals = (pieces_of([v[span] for v in some], plan.n_fractions) for some in (flat, flat_results))
            weights = _of_span(matrices, span)
            begun: set[int] = set()
            for source, result, matrix, row in plan.terms:
                v, weight, total = sources[source], weights[matrix][row][result], totals[result]
                if result in begun:
                    total.addcmul_(v, weight)
                elif plan.keeps:
                    torch.addcmul(sources[result], v, weight, out=total)
                else:
                    torch.mul(v, weight, out=total)
                begun.add(result)
        return tuple(result.to(given[0].dtype) for result in results)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Any, ...]:
        residual, write, *given = ctx.saved_tensors
        plan: _Plan = ctx.plan
        m, dtype = plan.n_fractions, statistics_dtype(given[0])
        matrices = _flat_weights((residual, write), dtype)
        # With an identity, the gradient of a stream is that of its own result.
        kept = len(grad_outputs) if plan.keeps else 0
        wanted = [needed and k >= kept for k, needed in enumerate(ctx.needs_input_grad[3:])]
        grad_given = [torch.empty_like(v, dtype=dtype) if needed else None for v, needed in zip(given, wanted, strict=True)]
        first = 0 if ctx.needs_input_grad[1] else len(given) - 1
        products = Products(len(given[first:]) * m, plan.n_results, m, given[0]) if any(ctx.needs_input_grad[1:3]) else None
        flat, flat_results = rows_of(given), rows_of([grad.to(dtype) for grad in grad_outputs])
        flat_given = [None if grad is None else grad.view(-1, grad.shape[-1]) for grad in grad_given]
        for span in spans(flat[0]):
            grads = pieces_of([grad[span] for grad in flat_results], m)
            if products is not None:
                products.add(span, pieces_of([v[span] for v in flat[first:]], m), grads)
            weights = _of_span(matrices, span)
            totals = [None if grad is None else pieces_of([grad[span]], m) for grad in flat_given]
            begun: set[int] = set()
            for source, result, matrix, row in plan.terms:
                pieces = totals[source // m]
                if pieces is None:
                    continue
                if source in begun:
                    pieces[source % m].addcmul_(grads[result], weights[matrix][row][result])
                else:
                    torch.mul(grads[result], weights[matrix][row][result], out=pieces[source % m])
                begun.add(source)
        grad_given[:kept] = grad_outputs[:kept]
        grad_weights = (None, None) if products is None else products.split(plan, residual, write)
        return (
            None,
            *(grad if needed else None for grad, needed in zip(grad_weights, ctx.needs_input_grad[1:3], strict=True)),
            *(None if grad is None else grad.to(v.dtype) for grad, v in zip(grad_given, given, strict=True)),
        )


class Products:
    """The product of every source piece with the gradient of every result piece: the gradients of all weights."""

    def __init__(self, n_sources: int, n_results: int, m: int, like: Tensor) -> None:
        self.tokens, width = like.shape[:2], like.shape[-1] // m
        self.values = like.new_empty(self.tokens.numel(), n_sources, n_results, dtype=statistics_dtype(like))
        # Both sides are copied to contiguous memory, for so few tokens that they are still in cache for the product.
        self.step = max(1, spans(like.flatten(0, 1))[0].stop // 4)
        self.left, self.right = (self.values.new_empty(self.step, n, width) for n in (n_sources, n_results))

    @outside_autocast
    def add(self, span: slice, sources: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        """Computes the products of some tokens, one matrix product per token."""
        values = self.values[span]
        for start in range(0, len(values), self.step):
            part = slice(start, start + self.step)
            tokens = len(values[part])
            left, right = self.left[:tokens], self.right[:tokens]
            torch.stack([v[part] for v in sources], dim=1, out=left)
            torch.stack([v[part] for v in grads], dim=1, out=right)
            torch.bmm(left, right.transpose(1, 2), out=values[part])

    def split(self, plan: _Plan, residual: Tensor | None, write: Tensor | None) -> Iterator[Tensor | None]:
        """The gradients of both matrices."""
        values = self.values.unflatten(0, self.tokens).permute(2, 3, 0, 1)
        pieces = values.shape[0] - (0 if write is None else plan.n_fractions)
        for weights, found in ((residual, values[:pieces]), (write, values[pieces:])):
            if weights is None or not len(found):
                yield None
                continue
            if weights is write and len(weights) < plan.n_fractions:
                results = torch.arange(plan.n_results, device=found.device)
                found = found[results % plan.n_fractions, results].unsqueeze(0)
            yield (found.sum((-2, -1)) if weights.ndim == 2 else found).to(weights.dtype)


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


def _flat_weights(matrices: Sequence[Tensor | None], dtype: torch.dtype) -> list[Tensor]:
    """As [rows, results, 1] or, one per token, [rows, results, N, 1]; empty where there is none."""
    return [matrix.flatten(2, 3) if matrix.ndim == 5 else matrix for matrix in _widened(matrices, dtype)]


def _of_span(matrices: Sequence[Tensor], span: slice) -> list[list[tuple[Tensor, ...]]]:
    """Every weight as a tensor of its own, by matrix, row and result."""
    cut = [matrix[:, :, span] if matrix.ndim == 4 else matrix for matrix in matrices]
    return [[row.unbind() for row in matrix.unbind()] for matrix in cut]


def _widened(matrices: Sequence[Tensor | None], dtype: torch.dtype) -> list[Tensor]:
    """Each in the precision of statistics and with an axis for the features; empty where there is none."""
    # Type promotion ignores a tensor without axes: products with a narrower stream would stay in its precision.
    return [torch.empty(0, 0, 1) if matrix is None else matrix.to(dtype).unsqueeze(-1) for matrix in matrices]
