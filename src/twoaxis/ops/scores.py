"""Scores linear in a token or in all its parallel streams, in the precision of statistics.

Letters: B batch, T position, D width, n streams, C scores of a token, N = B T tokens. The streams are never concatenated: the
map is cut instead, and the norm is one number per token.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from twoaxis.core.errors import ConfigError
from twoaxis.ops.precision import Impl, outside_autocast, refuse_second_gradients, runs_plain, statistics_dtype
from twoaxis.ops.streams import spans

SMALLEST_RMS = 1e-12
"""Lower bound of the rms of a row, so that a row of zeros has a score."""


@outside_autocast
def row_product(x: Float[Tensor, "B T D"], weight: Float[Tensor, " D"], impl: Impl = "fused") -> Float[Tensor, "B T"]:
    """Returns x w for every token, in the precision of statistics.

    BLAS computes a matrix-vector product on one core; product and sum, and a product per sequence in the backward pass,
    use all of them.

    Cost: flops 2*D per token; saves x and w
    """
    dtype = statistics_dtype(x)
    if runs_plain(impl):
        return x.to(dtype) @ weight.to(dtype)
    return _RowProduct.apply(x, weight)


@outside_autocast
def sum_of_rows(x: Float[Tensor, "B T D"], weight: Float[Tensor, "B T"]) -> Float[Tensor, " D"]:
    """Returns the sum over tokens of each row times its weight; a product per sequence, so that all cores take part."""
    return torch.bmm(weight.unsqueeze(1), x.to(weight.dtype)).sum((0, 1))


# Measured, a training step with the plain form: 1.00 of the saved bytes in float32, 1.37 in bfloat16.
class _RowProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return (x * weight.to(statistics_dtype(x))).sum(-1)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (grad,) = grad_outputs
        x, weight = ctx.saved_tensors
        grad_x = (grad.unsqueeze(-1) * weight.to(grad.dtype)).to(x.dtype) if ctx.needs_input_grad[0] else None
        return grad_x, sum_of_rows(x, grad).to(weight.dtype)


@outside_autocast
def linear_scores(x: Float[Tensor, "B T D"], weight: Float[Tensor, "C D"], impl: Impl = "fused") -> Float[Tensor, "C B T"]:
    """Multiplies each token with each row of a weight; the scores of one row are contiguous.

    Cost: matrix product flops 2*C*D per token; saves x and the weight

    Example:
        >>> linear_scores(torch.tensor([[[1.0, 2.0]]]), torch.eye(2)).flatten()
        tensor([1., 2.])
    """
    if runs_plain(impl):
        dtype = statistics_dtype(x)
        return (x.to(dtype) @ weight.to(dtype).T).permute(2, 0, 1)
    return _LinearScores.apply(x, weight)


# Measured, a training step with the plain form: 1.00 of the saved bytes in float32, 1.09 in bfloat16. It stays, since its
# gradients are in float32 also when the backward pass runs under autocast.
class _LinearScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        dtype = statistics_dtype(x)
        return torch.mm(weight.to(dtype), x.reshape(-1, x.shape[-1]).to(dtype).T).view(len(weight), *x.shape[:2])

    @staticmethod
    @outside_autocast
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor]:
        x, weight = ctx.saved_tensors
        grad = grad_outputs[0].flatten(1)
        grad_weight = torch.mm(grad, x.reshape(-1, x.shape[-1]).to(grad.dtype)).to(weight.dtype)
        grad_x = torch.mm(grad.T, weight.to(grad.dtype)).view(x.shape).to(x.dtype) if ctx.needs_input_grad[0] else None
        return grad_x, grad_weight


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


# Measured, a training step with the plain form: 1.47 of the time, 1.01 of the saved bytes in float32, 1.73 in bfloat16.
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
        scores = scores.mul_(inverse).view(len(weight), B, T)
        ctx.save_for_backward(weight, scores, inverse, *streams)
        return scores

    @staticmethod
    @outside_autocast
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """With g the gradient of the scores: dS_j = r g^T w_j - r^2 (g^T s) S_j / (n D)."""
        refuse_second_gradients("joint_scores")
        grad = grad_outputs[0]
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


@outside_autocast
def stream_scores(
    streams: Sequence[Float[Tensor, "B T D"]], weight: Float[Tensor, "C D"], eps: float, impl: Impl = "fused"
) -> Float[Tensor, "n C B T"]:
    """Divides every stream by its own rms and multiplies it with each row of a weight that all streams share.

    Equation: s_jc = w_c^T S_j / sqrt(mean(S_j^2) + eps)
    Source:   lucidrains/hyper-connections 0.4.11, the scores of its mHC
    Deviates: the fused engine scales the product instead of the stream, (w_c^T S_j) / rms(S_j)
    Cost:     matrix product flops 2*C*D per stream and token, and 3*D more; saves the streams, the weight, and C + 1 numbers
              per stream and token
    """
    weight = weight.to(statistics_dtype(streams[0]))
    if runs_plain(impl):
        return torch.stack([(_over_rms(x.to(weight.dtype), eps) @ weight.T).movedim(-1, 0) for x in streams])
    return _StreamScores.apply(weight, eps, *streams)


def _over_rms(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt((x.square().mean(-1, keepdim=True) + eps).clamp_min(SMALLEST_RMS**2))


# Measured, a training step with the plain form: 1.27 of the saved bytes in float32, 2.02 in bfloat16.
class _StreamScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, eps: float, *streams: Tensor) -> Tensor:
        B, T, D = streams[0].shape
        scores = weight.new_empty(len(streams), weight.shape[0], B * T)
        inverses = weight.new_empty(len(streams), B * T)
        for k, stream in enumerate(streams):
            x = stream.reshape(-1, D)
            for span in spans(x):
                square = torch.linalg.vector_norm(x[span], dim=-1, dtype=weight.dtype).square_().div_(D)
                inverses[k, span] = square.add_(eps).clamp_min_(SMALLEST_RMS**2).rsqrt_()
                scores[k, :, span] = torch.mm(weight, x[span].to(weight.dtype).T).mul_(inverses[k, span])
        scores = scores.view(len(streams), len(weight), B, T)
        ctx.save_for_backward(weight, scores, inverses, *streams)
        return scores

    @staticmethod
    @outside_autocast
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """With g the gradient of the scores and r the inverse rms: dx = r (g^T W - r (g^T s) x / D)."""
        refuse_second_gradients("stream_scores")
        (grad,) = grad_outputs
        weight, scores, inverses, *streams = ctx.saved_tensors
        C, D = weight.shape
        along = (grad * scores).sum(1).div_(-D)
        grad_weight = torch.zeros_like(weight)
        grad_streams: list[Tensor | None] = []
        for k, (stream, needed) in enumerate(zip(streams, ctx.needs_input_grad[2:], strict=True)):
            x, inverse = stream.reshape(-1, D), inverses[k]
            by_row, along_x = grad[k].reshape(C, -1) * inverse, along[k].reshape(-1) * inverse.square()
            grad_x = torch.empty_like(x, dtype=weight.dtype) if needed else None
            for span in spans(x):
                grad_weight.addmm_(by_row[:, span], x[span].to(weight.dtype))
                if grad_x is not None:
                    torch.mm(by_row[:, span].T, weight, out=grad_x[span]).addcmul_(x[span], along_x[span].unsqueeze(-1))
            grad_streams.append(None if grad_x is None else grad_x.view(stream.shape).to(stream.dtype))
        return grad_weight, None, *grad_streams
