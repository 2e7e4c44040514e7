"""Multi-head softmax attention of one query over a short list of keys and values, such as those of earlier layers.

Letters: B batch, T position, H heads, K key width, S sources. Keys and values are sequences of separate tensors: a stack
would copy the whole history at every read, and autograd would keep every copy.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from twoaxis.core.errors import ConfigError
from twoaxis.ops.precision import Impl, outside_autocast, runs_plain, statistics_dtype

Source = Float[Tensor, "B T H K"]


@outside_autocast
def depth_attention(q: Source, keys: Sequence[Source], values: Sequence[Source], impl: Impl = "fused") -> Source:
    """Attends from each token's query to its own keys along depth, with one softmax per head.

    Equation: y = sum_i a_i v_i,  a = softmax_i(q^T k_i / sqrt(K)), per token and head
    Source:   Residual Stream Duality, arXiv:2603.16039, section 2.2; it is causal attention with depth as the position
    Shapes:   softmax in float32 (float64 for float64); y in the dtype of the values, rounded once
    Cost:     flops 4*K per head, source and token; saves q, keys, values and one weight per source, head and token

    Raises:
        ConfigError: no source, or not one key per value.

    Example:
        >>> one = torch.ones(1, 1, 1, 2)
        >>> depth_attention(one, [one, one], [one, 3 * one])
        tensor([[[[2., 2.]]]])
    """
    if not keys or len(keys) != len(values):
        raise ConfigError(f"depth_attention: got {len(keys)} keys and {len(values)} values; give one of each per source")
    if runs_plain(impl):
        weights = depth_attention_weights(q, keys).unsqueeze(-1)
        mixed = weights[0] * values[0]
        for weight, v in zip(weights[1:], values[1:], strict=True):
            mixed = mixed + weight * v
        return mixed.to(values[0].dtype)
    return _DepthAttention.apply(q, *keys, *values)


@outside_autocast
def depth_attention_weights(q: Source, keys: Sequence[Source]) -> Float[Tensor, "S B T H"]:
    """The softmax weights of `depth_attention`, for audits and for the reference engine."""
    wide = q.to(statistics_dtype(q)) / math.sqrt(q.shape[-1])
    return torch.softmax(torch.stack([(wide * k).sum(-1) for k in keys]), dim=0)


class _DepthAttention(torch.autograd.Function):
    """One sweep over the keys and one over the values forward; one over both backward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, *sources: Tensor) -> Tensor:
        n = len(sources) // 2
        keys, values = sources[:n], sources[n:]
        wide = q.to(statistics_dtype(q)) / math.sqrt(q.shape[-1])
        buffer = torch.empty_like(wide)
        scores = torch.stack([torch.mul(wide, k, out=buffer).sum(-1) for k in keys])
        weights = torch.softmax(scores, dim=0)
        mixed = torch.mul(values[0], weights[0].unsqueeze(-1), out=buffer)
        for v, weight in zip(values[1:], weights[1:], strict=True):
            mixed.addcmul_(v, weight.unsqueeze(-1))
        ctx.save_for_backward(q, weights, *sources)
        return mixed.to(values[0].dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, ...]:
        q, weights, *sources = ctx.saved_tensors
        n = len(sources) // 2
        keys, values = sources[:n], sources[n:]
        grad = grad_outputs[0].to(weights.dtype)
        scaled = q.to(weights.dtype) / math.sqrt(q.shape[-1])
        buffer = torch.empty_like(grad)
        by_weight = torch.stack([torch.mul(grad, v, out=buffer).sum(-1) for v in values])
        # Not grad^T y, which would be rounded where y was rounded to a narrower dtype.
        by_score = by_weight.sub_((weights * by_weight).sum(0)).mul_(weights)
        grad_q = torch.zeros_like(grad)
        grad_keys, grad_values = [], []
        for k, v, weight, score in zip(keys, values, weights, by_score, strict=True):
            grad_q.addcmul_(score.unsqueeze(-1), k)
            grad_keys.append((score.unsqueeze(-1) * scaled).to(k.dtype))
            grad_values.append((grad * weight.unsqueeze(-1)).to(v.dtype))
        return grad_q.div_(math.sqrt(q.shape[-1])).to(q.dtype), *grad_keys, *grad_values
