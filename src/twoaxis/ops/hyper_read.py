"""The dynamic read of Hyper- and Frac-Connections: the mixing weights of each token, and the input of the sublayer.

Letters: B batch, T position, D width, n streams, m fractions of a stream, P = n m pieces (all fractions of the first stream,
then those of the next), E = D / m width of a piece, C columns: weights that start from one piece, N = B T tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from twoaxis.ops.cpu import cpu_only
from twoaxis.ops.precision import Impl, outside_autocast, refuse_second_gradients, runs_plain, statistics_dtype
from twoaxis.ops.scores import SMALLEST_RMS
from twoaxis.ops.streams import pieces_of, rows_of, spans

StreamNorm = Literal["layer", "rms"]
Activation = Literal["tanh", "none"]


@dataclass(frozen=True)
class ScoreRule:
    """The scores of a piece: norm and its eps, activation, and fractions of a stream."""

    norm: StreamNorm
    eps: float
    activation: Activation = "tanh"
    n_fractions: int = 1


class HyperRead(NamedTuple):
    """The input of the sublayer, the columns of the weights after those of the read, and the streams for the write.

    The streams are the ones that were read. Only when the write takes them from here do their gradients from both meet in one
    buffer.
    """

    view: Float[Tensor, "B T D"]
    weights: Float[Tensor, "P columns B T"]
    streams: tuple[Float[Tensor, "B T D"], ...]


@outside_autocast
def hyper_read(
    streams: Sequence[Float[Tensor, "B T D"]],
    static: Float[Tensor, "P C"],
    scale: Float[Tensor, " C"],
    maps: Float[Tensor, "C E"],
    offset: Float[Tensor, " C"] | None,
    rule: ScoreRule,
    impl: Impl = "fused",
) -> HyperRead:
    """Computes the weights of every token from its normalised pieces and reads with the first m columns of them.

    Equation: A_jc = static_jc + scale_c * act(w_c^T norm(x_j) + offset_c),  u_r = sum_j A_jr x_j for fraction r < m
              layer: norm(x) = (x - mean(x)) / sqrt(var(x) + eps),  rms: norm(x) = x / sqrt(mean(x^2) + eps)
    Source:   Hyper-Connections, arXiv:2409.19606v3, algorithm 2 (width connection)
    Deviates: the fused engine scales the product instead of the stream, (w^T x) / rms(x), and takes the mean off the map:
              w^T (x - mean(x)) = (w - mean(w))^T x
    Shapes:   norms, scores and weights in float32; the view in the dtype of the streams, rounded once
    Engines:  on a CPU kernels in C: float32, at most 64 pieces and columns. Everything else runs in plain PyTorch
    Cost:     matrix product flops 2*C*D per stream and token; saves the streams, C + 1 numbers per piece and token (layer:
              C + 2), and static, scale, maps and offset where they are copies
    """
    dtype = statistics_dtype(streams[0])
    static, scale, maps = static.to(dtype), scale.to(dtype), maps.to(dtype)
    offset = torch.zeros_like(scale) if offset is None else offset.to(dtype)
    if runs_plain(impl):
        return _plain(streams, static, scale, maps, offset, rule)
    if rule.norm == "layer":
        maps = maps - maps.mean(-1, keepdim=True)
    view, weights, *passed = _HyperRead.apply(rule, static, scale, maps, offset, *streams)
    return HyperRead(view, weights, tuple(passed))


def _plain(
    streams: Sequence[Tensor], static: Tensor, scale: Tensor, maps: Tensor, offset: Tensor, rule: ScoreRule
) -> HyperRead:
    m = rule.n_fractions
    pieces = [piece.to(maps.dtype) for piece in pieces_of(streams, m)]
    weights = hyper_weights(streams, static, scale, maps, offset, rule)
    views = []
    for fraction in range(m):
        view = weights[0, fraction].unsqueeze(-1) * pieces[0]
        for j in range(1, len(pieces)):
            view = view + weights[j, fraction].unsqueeze(-1) * pieces[j]
        views.append(view.to(streams[0].dtype))
    return HyperRead(views[0] if m == 1 else torch.cat(views, dim=-1), weights[:, m:], tuple(streams))


@outside_autocast
def hyper_weights(
    streams: Sequence[Float[Tensor, "B T D"]],
    static: Float[Tensor, "P C"],
    scale: Float[Tensor, " C"],
    maps: Float[Tensor, "C E"],
    offset: Float[Tensor, " C"] | None,
    rule: ScoreRule,
) -> Float[Tensor, "P C B T"]:
    """All weights of `hyper_read`, those of the view first, for audits and for the reference engine."""
    dtype = statistics_dtype(streams[0])
    maps = maps.to(dtype)
    pieces = [piece.to(dtype) for piece in pieces_of(streams, rule.n_fractions)]
    products = [_normalised(piece, rule.norm, rule.eps) @ maps.T for piece in pieces]
    scores = torch.stack([(product if offset is None else product + offset.to(dtype)).movedim(-1, 0) for product in products])
    change = torch.tanh(scores) if rule.activation == "tanh" else scores
    return static.to(dtype)[:, :, None, None] + scale.to(dtype)[:, None, None] * change


def _normalised(piece: Tensor, norm: StreamNorm, eps: float) -> Tensor:
    if norm == "layer":
        return F.layer_norm(piece, piece.shape[-1:], eps=eps)
    return piece * torch.rsqrt((piece.square().mean(-1, keepdim=True) + eps).clamp_min(SMALLEST_RMS**2))


def _change(scores: Tensor, offset: Tensor, rule: ScoreRule) -> Tensor:
    """The numbers that tokens add to the static weights, before their scale."""
    shifted = scores + offset.unsqueeze(-1)
    return shifted.tanh_() if rule.activation == "tanh" else shifted


def _by_piece(rows: Float[Tensor, "n C rows"], m: int) -> Float[Tensor, "P C tokens"]:
    """From the order of the rows of a stream, fraction by fraction of each token, to the order of pieces."""
    return rows if m == 1 else rows.unflatten(-1, (-1, m)).permute(0, 3, 1, 2).flatten(0, 1)


def _by_row(pieces: Float[Tensor, "P C tokens"], m: int) -> Float[Tensor, "n C rows"]:
    return pieces if m == 1 else pieces.unflatten(0, (-1, m)).permute(0, 2, 3, 1).flatten(2)


def _normalised_products(streams: list[Tensor], maps: Tensor, rule: ScoreRule) -> tuple[Tensor, Tensor]:
    """Every map times every normalised row, and the statistics of the rows: their inverse deviation and, for `layer`, mean."""
    m, (C, E) = rule.n_fractions, maps.shape
    rows = [stream.reshape(-1, E).to(maps.dtype) for stream in streams]
    products = maps.new_empty(len(rows), C, len(rows[0]))
    statistics = maps.new_empty(2 if rule.norm == "layer" else 1, len(rows), len(rows[0]))
    buffer = torch.empty_like(rows[0]) if rule.norm == "layer" else None
    for k, x in enumerate(rows):
        torch.mm(maps, x.T, out=products[k])
        if buffer is not None:
            # Not the mean square less the squared mean, which cancels where the mean is large.
            x = torch.sub(x, torch.mean(x, -1, out=statistics[1, k]).unsqueeze(-1), out=buffer)
        torch.linalg.vector_norm(x, dim=-1, out=statistics[0, k])
    statistics[0].square_().div_(E).add_(rule.eps).clamp_min_(SMALLEST_RMS**2).rsqrt_()
    return _by_piece(products.mul_(statistics[0].unsqueeze(1)), m), statistics


# Measured, a training step with the plain form: 1.01 of the time, 1.27 of the saved bytes in float32, 2.56 in bfloat16.
class _HyperRead(torch.autograd.Function):
    """Goes through the tokens once in each direction, a few at a time, so that every stream is read from memory once."""

    @staticmethod
    def forward(
        ctx: Any, rule: ScoreRule, static: Tensor, scale: Tensor, maps: Tensor, offset: Tensor, *streams: Tensor
    ) -> tuple[Tensor, ...]:
        m, tokens, flat = rule.n_fractions, streams[0].shape[:2], rows_of(streams)
        # A stream is returned as a tensor of its own; nothing writes to it in place.
        passed = [stream.detach() for stream in streams]
        parameters = static, scale, maps, offset
        ctx.rule, ctx.in_c = rule, cpu_only.serves_hyper_read(streams, parameters, m)
        if ctx.in_c:
            smallest, centred = SMALLEST_RMS**2, rule.norm == "layer"
            given = streams, parameters, m, rule.eps, smallest, centred, rule.activation == "tanh"
            view, weights, scores, statistics = cpu_only.hyper_read(*given)
            ctx.save_for_backward(*parameters, scores, statistics, *streams)
            return view, weights.unflatten(-1, tokens)[:, m:], *passed
        scores, weights = (maps.new_empty(*static.shape, tokens.numel()) for _ in range(2))
        statistics = maps.new_empty(2 if rule.norm == "layer" else 1, len(streams), tokens.numel() * m)
        view = torch.empty_like(flat[0], dtype=maps.dtype)
        for span in spans(flat[0], 2):
            some = [stream[span] for stream in flat]
            scores[..., span], statistics[..., _rows(span, m)] = _normalised_products(some, maps, rule)
            change = _change(scores[..., span], offset, rule)
            own = torch.addcmul(static.unsqueeze(-1), scale.unsqueeze(-1), change, out=weights[..., span])
            pieces = pieces_of(some, m)
            for total, column in zip(pieces_of([view[span]], m), own[:, :m].unsqueeze(-1).unbind(1), strict=True):
                reads = column.unbind()
                torch.mul(pieces[0], reads[0], out=total)
                for piece, weight in zip(pieces[1:], reads[1:], strict=True):
                    total.addcmul_(piece, weight)
        ctx.save_for_backward(static, scale, maps, offset, scores, statistics, *streams)
        return view.view_as(streams[0]).to(streams[0].dtype), weights.unflatten(-1, tokens)[:, m:], *passed

    @staticmethod
    @outside_autocast
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """With g the gradient of the scores s and r the inverse: dx = r (g^T W - (g^T s) norm(x) / E) + that of the read."""
        refuse_second_gradients("hyper_read")
        grad_view, grad_rest, *grad_passed = grad_outputs
        static, scale, maps, offset, scores, statistics, *streams = ctx.saved_tensors
        rule: ScoreRule = ctx.rule
        m, E, dtype = rule.n_fractions, maps.shape[1], maps.dtype
        if ctx.in_c:
            grads, parameters, bounded = (
                (grad_view, grad_rest, grad_passed),
                (static, scale, maps, offset),
                rule.activation == "tanh",
            )
            *found, results = cpu_only.hyper_read_backward(grads, streams, parameters, scores, statistics, m, bounded)
            return None, *found, *results
        flat, (flat_view,), flat_passed = (rows_of(some) for some in (streams, [grad_view], grad_passed))
        grad_rest = grad_rest.flatten(2)
        results = [torch.empty_like(x, dtype=dtype) for x in flat]
        grad_static, grad_scale, grad_maps, grad_offset = (torch.zeros_like(x) for x in (static, scale, maps, offset))
        # A last row of ones carries the mean, so that one product gives all of the gradient that is not along x.
        wide = torch.cat((maps, torch.ones_like(maps[:1]))) if rule.norm == "layer" else maps
        for span in spans(flat[0], 2):
            pieces, passed, totals = (pieces_of([x[span] for x in some], m) for some in (flat, flat_passed, results))
            views = pieces_of([flat_view[span].to(dtype)], m)
            own, change = scores[..., span], _change(scores[..., span], offset, rule)
            weights = torch.addcmul(static[:, :m, None], scale[:m, None], change[:, :m]).unsqueeze(-1)
            buffer = torch.empty_like(views[0])
            reads: list[Tensor] = []
            for piece, total, grad, row in zip(pieces, totals, passed, weights.unbind(), strict=True):
                for r, (part, weight) in enumerate(zip(views, row.unbind(), strict=True)):
                    reads.append(torch.mul(part, piece, out=buffer).sum(-1))
                    torch.addcmul(total if r else grad, part, weight, out=total)
            grad_weights = torch.cat((torch.stack(reads).unflatten(0, (-1, m)), grad_rest[..., span]), dim=1)
            grad_static += grad_weights.sum(-1)
            grad_scale += (grad_weights * change).sum((0, 2))
            grad_scores = grad_weights.mul_(scale.unsqueeze(-1))
            if rule.activation == "tanh":
                grad_scores.addcmul_(grad_scores, change.square_(), value=-1)
            grad_offset += grad_scores.sum((0, 2))
            inverse, *means = statistics[..., _rows(span, m)].unbind()
            along = _by_row((grad_scores * own).sum(1, keepdim=True).div_(-E), m) * inverse.square().unsqueeze(1)
            by_row = _by_row(grad_scores, m) * inverse.unsqueeze(1)
            all_rows = torch.cat((by_row, -along * means[0].unsqueeze(1)), dim=1) if means else by_row
            for k, stream in enumerate(flat):
                x = stream[span].reshape(-1, E)
                grad_maps.addmm_(by_row[k], x.to(dtype))
                results[k][span].view(-1, E).addmm_(all_rows[k].T, wide).addcmul_(x, along[k].T)
        grads = (x.view(stream.shape).to(stream.dtype) for x, stream in zip(results, streams, strict=True))
        return None, grad_static, grad_scale, grad_maps, grad_offset, *grads


def _rows(span: slice, m: int) -> slice:
    """The rows of pieces of these tokens."""
    return slice(span.start * m, span.stop * m)
