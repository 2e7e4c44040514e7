"""Joint scores of parallel residual streams: one linear map of all of them side by side, normalised together.

Letters: B batch, T position, D width, n streams, C scores of a token, N = B T tokens. The streams are never set side by side:
the map is cut instead, and the norm is one number per token.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from twoaxis.core.errors import ConfigError
from twoaxis.ops.precision import Impl, outside_autocast, runs_plain, statistics_dtype


@outside_autocast
def joint_scores(
    streams: Sequence[Float[Tensor, "B T D"]], weight: Float[Tensor, "C nD"], eps: float, impl: Impl = "fused"
) -> Float[Tensor, "C B T"]:
    """Divides the streams of a token by their common rms and multiplies them with each row of a weight.

    Equation: s_c = r sum_j w_cj^T S_j,  r = 1 / sqrt(mean_j mean(S_j^2) + eps),  w_c = (w_c1, ..., w_cn)
    Source:   mHC, arXiv:2512.24880, eq. 7
    Cost:     matrix product flops 2*C*n*D per token, and 2*n*D more; saves the streams, the weight, and C + 1 numbers per token

    Raises:
        ConfigError: a weight for another number of streams.

    Example:
        >>> streams = torch.full((1, 1, 1), 3.0), torch.full((1, 1, 1), 4.0)
        >>> joint_scores(streams, torch.tensor([[0.0, 1.0]]), 0.0)
        tensor([[[1.1314]]])
    """
    n, D = len(streams), streams[0].shape[-1]
    if weight.shape[1] != n * D:
        got = f"got a weight of width {weight.shape[1]} for {n} streams of width {D}"
        raise ConfigError(f"joint_scores: {got}; give n*D columns")
    if runs_plain(impl):
        return _plain(streams, weight.to(statistics_dtype(streams[0])), eps)
    return _JointScores.apply(weight, eps, *streams)


def _plain(streams: Sequence[Tensor], weight: Tensor, eps: float) -> Tensor:
    square = torch.zeros((), dtype=weight.dtype, device=weight.device)
    scores = torch.zeros((), dtype=weight.dtype, device=weight.device)
    for stream, part in zip(streams, weight.chunk(len(streams), dim=1), strict=True):
        wide = stream.to(weight.dtype)
        square = square + wide.square().mean(-1)
        scores = scores + wide @ part.T
    return (scores * torch.rsqrt(square / len(streams) + eps).unsqueeze(-1)).permute(2, 0, 1)


class _JointScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, eps: float, *streams: Tensor) -> Tensor:
        dtype = statistics_dtype(streams[0])
        parts = weight.to(dtype).chunk(len(streams), dim=1)
        B, T, D = streams[0].shape
        scores = torch.empty(weight.shape[0], B * T, dtype=dtype, device=weight.device)
        square = torch.zeros(B * T, dtype=dtype, device=weight.device)
        for j, (stream, part) in enumerate(zip(streams, parts, strict=True)):
            x = stream.reshape(-1, D)
            norm = torch.linalg.vector_norm(x, dim=-1, dtype=dtype)
            square.addcmul_(norm, norm)
            torch.addmm(scores, part, x.to(dtype).T, beta=int(j > 0), out=scores)
        inverse = square.div_(len(streams) * D).add_(eps).rsqrt_()
        scores = scores.mul_(inverse).view(-1, B, T)
        ctx.save_for_backward(weight, scores, inverse, *streams)
        return scores

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return _backward(ctx, *grad_outputs)


@outside_autocast
def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """With g the gradient of the scores: dS_j = r g^T w_j - r^2 (g^T s) S_j / (n D)."""
    weight, scores, inverse, *streams = ctx.saved_tensors
    n, D = len(streams), streams[0].shape[-1]
    by_row = grad.reshape(grad.shape[0], -1)
    along = (by_row * scores.flatten(1)).sum(0).mul_(inverse.square()).div_(-n * D).unsqueeze(-1)
    by_row = by_row * inverse
    grad_weight = torch.empty_like(weight, dtype=grad.dtype) if ctx.needs_input_grad[0] else None
    grad_streams: list[Tensor | None] = []
    for j, (stream, part) in enumerate(zip(streams, weight.to(grad.dtype).chunk(n, dim=1), strict=True)):
        x = stream.reshape(-1, D)
        if grad_weight is not None:
            torch.mm(by_row, x.to(grad.dtype), out=grad_weight[:, j * D : (j + 1) * D])
        if not ctx.needs_input_grad[2 + j]:
            grad_streams.append(None)
            continue
        grad_x = torch.mm(by_row.T, part).addcmul_(x, along)
        grad_streams.append(grad_x.view(stream.shape).to(stream.dtype))
    return None if grad_weight is None else grad_weight.to(weight.dtype), None, *grad_streams
