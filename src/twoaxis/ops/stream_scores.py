"""Scores of parallel residual streams: a linear map of each normalised stream, without ever forming the normalised one.

Letters: B batch, T position, D width, m fractions of a stream, P pieces (all fractions of the first stream, then those of
the next), E = D / m width of a piece, C scores of a piece, N = B T tokens.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from twoaxis.ops.precision import Impl, outside_autocast, runs_plain, statistics_dtype
from twoaxis.ops.streams import pieces_of, spans

StreamNorm = Literal["layer", "rms"]
SMALLEST_RMS = 1e-12
"""What the rms of a piece counts as at least, so that a piece of zeros has a score."""


@outside_autocast
def stream_scores(
    streams: Sequence[Float[Tensor, "B T D"]],
    weight: Float[Tensor, "C E"],
    norm: StreamNorm,
    eps: float,
    n_fractions: int = 1,
    impl: Impl = "fused",
) -> Float[Tensor, "P C B T"]:
    """Normalises every piece of every stream and multiplies it with each row of a weight that all pieces share.

    Equation: s_jc = w_c^T norm(x_j);  layer: norm(x) = (x - mean(x)) / sqrt(var(x) + eps),  rms: x / sqrt(mean(x^2) + eps)
    Source:   Hyper-Connections, arXiv:2409.19606v3, algorithm 2, the argument of tanh
    Deviates: the fused engine scales the product instead of the stream, (x^T w_c) / rms(x), and takes the mean off the weight:
              w^T (x - mean(x)) = (w - mean(w))^T x
    Cost:     matrix product flops 2*C*D per stream and token, 3*D more for rms and 4*D for layer; saves the streams, C + 1
              numbers per piece and token (layer: C + 2), and the weight (layer: its centred copy)
    """
    dtype = statistics_dtype(streams[0])
    weight = weight.to(dtype)
    if runs_plain(impl):
        return _plain(streams, weight, norm, eps, n_fractions)
    if norm == "layer":
        weight = weight - weight.mean(-1, keepdim=True)
    return _StreamScores.apply(weight, norm, eps, n_fractions, *streams)


def _plain(streams: Sequence[Tensor], weight: Tensor, norm: StreamNorm, eps: float, m: int) -> Tensor:
    pieces = [piece.to(weight.dtype) for piece in pieces_of(streams, m)]
    return torch.stack([(normalised(piece, norm, eps) @ weight.T).movedim(-1, 0) for piece in pieces])


def normalised(piece: Float[Tensor, "*rows E"], norm: StreamNorm, eps: float) -> Float[Tensor, "*rows E"]:
    """What is multiplied with a map."""
    if norm == "layer":
        return F.layer_norm(piece, piece.shape[-1:], eps=eps)
    return piece * torch.rsqrt((piece.square().mean(-1, keepdim=True) + eps).clamp_min(SMALLEST_RMS**2))


def _rows(streams: Sequence[Tensor], m: int) -> Iterator[Tensor]:
    """Every stream as [N m, E]."""
    for stream in streams:
        yield stream.reshape(-1, stream.shape[-1] // m)


def row_statistics(x: Tensor, norm: StreamNorm, eps: float, dtype: torch.dtype) -> list[Tensor]:
    """The inverse deviation (or rms) of each row and, for `layer`, its mean."""
    means: list[Tensor] = []
    if norm == "layer":
        means.append(x.mean(-1, dtype=dtype))
        # Not the mean square less the squared mean, which cancels where the mean is large.
        x = x - means[0].unsqueeze(-1)
    square = torch.linalg.vector_norm(x, dim=-1, dtype=dtype).square_().div_(x.shape[-1])
    return [square.add_(eps).clamp_min_(SMALLEST_RMS**2).rsqrt_(), *means]


class _StreamScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, norm: StreamNorm, eps: float, m: int, *streams: Tensor) -> Tensor:
        B, T = streams[0].shape[:2]
        C, N = weight.shape[0], B * T
        scores = weight.new_empty(len(streams), m, C, N)
        statistics = weight.new_empty(2 if norm == "layer" else 1, len(streams), N * m)
        product = weight.new_empty(C, N * m)
        for k, x in enumerate(_rows(streams, m)):
            for span in spans(x):
                statistics[:, k, span] = torch.stack(row_statistics(x[span], norm, eps, weight.dtype))
                product[:, span] = torch.mm(weight, x[span].to(weight.dtype).T).mul_(statistics[0, k, span])
            scores[k] = product.view(C, N, m).permute(2, 0, 1)
        scores = scores.view(-1, C, B, T)
        ctx.save_for_backward(weight, scores, statistics, *streams)
        ctx.m = m
        return scores

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return _backward(ctx, *grad_outputs)


@outside_autocast
def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """With g the gradient of the scores and r the inverse: dx = r (g^T W - (g^T s) norm(x) / E)."""
    weight, scores, statistics, *streams = ctx.saved_tensors
    m, (C, E) = ctx.m, weight.shape
    along = (grad * scores).sum(1).div_(-E)
    grad_weight = torch.zeros_like(weight)
    # A last row of ones carries the mean, so that one product gives all of the gradient that is not along x.
    wide = torch.cat((weight, torch.ones_like(weight[:1]))) if len(statistics) == 2 else weight
    grad_streams: list[Tensor | None] = []
    for k, (x, needed) in enumerate(zip(_rows(streams, m), ctx.needs_input_grad[4:], strict=True)):
        inverse = statistics[0, k]
        # From [m, C, N] to [C, N m], the order of the rows.
        by_row = grad[k * m : (k + 1) * m].flatten(2).permute(1, 2, 0).reshape(C, -1) * inverse
        along_x = along[k * m : (k + 1) * m].flatten(1).T.reshape(-1) * inverse.square()
        if len(statistics) == 2:
            by_row = torch.cat((by_row, (-along_x * statistics[1, k]).unsqueeze(0)))
        grad_x = torch.empty_like(x, dtype=weight.dtype) if needed else None
        for span in spans(x):
            grad_weight.addmm_(by_row[:C, span], x[span].to(weight.dtype))
            if grad_x is not None:
                torch.mm(by_row[:, span].T, wide, out=grad_x[span]).addcmul_(x[span], along_x[span].unsqueeze(-1))
        grad_streams.append(None if grad_x is None else grad_x.view(streams[k].shape).to(streams[k].dtype))
    return grad_weight, None, None, None, *grad_streams
