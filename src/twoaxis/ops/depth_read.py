"""The depth read: a softmax-weighted sum of sources along depth, scored by one learned query.

Letters: B batch, T position, D width, S depth sources. Sources are a sequence of separate tensors: a stack would
copy the whole history at every read, and autograd would keep every copy.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from twoaxis.core.errors import ConfigError
from twoaxis.ops.precision import Impl, outside_autocast, runs_plain, statistics_dtype
from twoaxis.ops.row_product import sum_of_rows


@outside_autocast
def depth_read(
    sources: Sequence[Float[Tensor, "B T D"]],
    inverse_rms: Sequence[Float[Tensor, "B T"]],
    query: Float[Tensor, " D"],
    impl: Impl = "fused",
) -> Float[Tensor, "B T D"]:
    """Mixes the sources of each token with softmax weights over depth.

    Equation: s_i = r_i * q^T v_i,  a = softmax_i(s),  h = sum_i a_i * v_i,  r_i = 1 / sqrt(mean(v_i^2) + eps)
    Source:   Attention Residuals, arXiv:2603.15031, eq. 2-4; q is the product of pseudo-query and key gain
    Deviates: the inverse rms of a source is given, since it is the same at every read of that source; it is a statistic of
              the source, so the gradient of the source includes what flows through it
    Cost:     flops 4*D per source and token; saves the sources themselves and 3 numbers per source and token

    Raises:
        ConfigError: no source, or sources of different shape, dtype or device.
    """
    _check(sources, inverse_rms)
    if runs_plain(impl):
        weights = depth_weights(sources, inverse_rms, query)
        return sum((w.unsqueeze(-1) * v for w, v in zip(weights, sources, strict=True)), torch.zeros(())).to(sources[0].dtype)
    if len(sources) == 1:
        return sources[0]
    return _DepthRead.apply(query, *sources, *inverse_rms)


@outside_autocast
def depth_weights(
    sources: Sequence[Float[Tensor, "B T D"]], inverse_rms: Sequence[Float[Tensor, "B T"]], query: Float[Tensor, " D"]
) -> Float[Tensor, "S B T"]:
    """The softmax weights of a depth read, for telemetry and for the reference engine."""
    query = query.to(statistics_dtype(sources[0]))
    scores = [(v * query).sum(-1) * with_gradient(r, v) for v, r in zip(sources, inverse_rms, strict=True)]
    return torch.softmax(torch.stack(scores), dim=0)


def with_gradient(inverse_rms: Float[Tensor, "B T"], v: Float[Tensor, "B T D"]) -> Float[Tensor, "B T"]:
    """The inverse rms of v with its gradient: dr = -r^3/2 d mean(v^2), whatever eps it was computed with."""
    square = v.to(inverse_rms.dtype).square().mean(-1)
    return inverse_rms - inverse_rms.pow(3) / 2 * (square - square.detach())


def _check(sources: Sequence[Tensor], inverse_rms: Sequence[Tensor]) -> None:
    if not sources or len(sources) != len(inverse_rms):
        raise ConfigError(
            f"depth_read: got {len(sources)} sources and {len(inverse_rms)} inverse rms; give one of each per source"
        )
    first = sources[0]
    for index, v in enumerate(sources):
        if v.shape != first.shape or v.dtype != first.dtype or v.device != first.device:
            raise ConfigError(
                f"depth_read: source {index} is {tuple(v.shape)} {v.dtype} on {v.device}: must be like source 0, "
                f"{tuple(first.shape)} {first.dtype} on {first.device}; pass sources of one shape, dtype and device"
            )


def _mean_of_products(weights: Tensor, grad: Tensor, sources: Sequence[Tensor]) -> Tensor:
    return torch.stack([weight * (grad * v).sum(-1) for weight, v in zip(weights, sources, strict=True)]).sum(0)


class _DepthRead(torch.autograd.Function):
    """Saves the sources, the result, the weights and the raw scores: linear in the number of sources."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, *tensors: Tensor) -> Tensor:
        n = len(tensors) // 2
        sources, inverse_rms = tensors[:n], tensors[n:]
        # One buffer for all products, which then holds the result. Not a matrix-vector product, which BLAS computes on one
        # core.
        wide_query = query.to(statistics_dtype(sources[0]))
        buffer = torch.empty_like(sources[0], dtype=wide_query.dtype)
        scores = torch.stack([torch.mul(v, wide_query, out=buffer).sum(-1) for v in sources])
        weights = torch.softmax(scores * torch.stack(inverse_rms), dim=0)
        mixed = torch.mul(sources[0], weights[0].unsqueeze(-1), out=buffer)
        for v, weight in zip(sources[1:], weights[1:], strict=True):
            mixed.addcmul_(v, weight.unsqueeze(-1))
        mixed = mixed.to(sources[0].dtype)
        ctx.save_for_backward(query, scores, weights, mixed, *tensors)
        return mixed

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        query, scores, weights, mixed, *tensors = ctx.saved_tensors
        n = len(tensors) // 2
        sources, inverse_rms = tensors[:n], tensors[n:]
        grad = grad_outputs[0].to(weights.dtype)
        wide_query = query.to(weights.dtype)
        # The mean of the weights' gradients is grad^T h, so that one sweep over the sources is enough; not when h
        # was rounded to a narrower dtype, since the rounding would then be larger than what it stands for.
        buffer = grad * mixed
        mean = buffer.sum(-1) if mixed.dtype == weights.dtype else _mean_of_products(weights, grad, sources)
        grad_query = torch.zeros_like(wide_query)
        grad_sources = []
        for v, factor, score, weight in zip(sources, inverse_rms, scores, weights, strict=True):
            grad_logit = torch.mul(grad, v, out=buffer).sum(-1).sub_(mean).mul_(weight)
            grad_score = grad_logit.mul_(factor)
            # The part of the gradient that flows through the inverse rms.
            along_v = (grad_score * score).mul_(factor.square()).div_(-v.shape[-1]).unsqueeze(-1)
            grad_query += sum_of_rows(v, grad_score)
            grad_v = (grad * weight.unsqueeze(-1)).addcmul_(grad_score.unsqueeze(-1), wide_query).addcmul_(along_v, v)
            grad_sources.append(grad_v.to(v.dtype))
        return grad_query.to(query.dtype), *grad_sources, *(None for _ in inverse_rms)
