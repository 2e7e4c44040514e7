"""Multi-head softmax attention of one query over a short list of keys and values, such as those of earlier layers.

Letters: B batch, T position, H heads, G kv-heads, K key width, S sources. Keys and values are sequences of separate tensors: a
stack would copy the whole history at every read, and autograd would keep every copy.
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
    _check("depth_attention", keys, values)
    return _plain(q, keys, values)[0] if runs_plain(impl) else _DepthAttention.apply(q, False, *keys, *values)[0]


@outside_autocast
def depth_summary(
    q: Float[Tensor, "B T H K"],
    keys: Sequence[Float[Tensor, "B T G K"]],
    values: Sequence[Float[Tensor, "B T G K"]],
    impl: Impl = "fused",
) -> tuple[Float[Tensor, "B T H"], Float[Tensor, "B T H K"]]:
    """Sums up keys and values along depth as one key, for a softmax in which others take part too (`local_attention`).

    Equation: score = log sum_i exp(s_i),  value = sum_i softmax_i(s) v_i,  s_i = q^T k_i / sqrt(K), per token and head
    Shapes:   consecutive groups of H/G query heads share a kv-head; the score in float32 (float64 for float64)
    Cost:     that of `depth_attention`

    Raises:
        ConfigError: no source, or not one key per value.

    Example:
        >>> one = torch.ones(1, 1, 1, 1)
        >>> score, value = depth_summary(one, [0 * one, 0 * one], [one, 3 * one])
        >>> score.exp().item(), value.item()
        (2.0, 2.0)
    """
    _check("depth_summary", keys, values)
    shape, G = q.shape, keys[0].shape[2]
    q = q if shape[2] == G else q.unflatten(2, (G, -1))
    value, score = _plain(q, keys, values) if runs_plain(impl) else _DepthAttention.apply(q, True, *keys, *values)
    return score.view(shape[:-1]), value.view(shape)


@outside_autocast
def depth_attention_weights(q: Float[Tensor, "B T *h K"], keys: Sequence[Float[Tensor, "B T _ K"]]) -> Tensor:
    """The softmax weights [S B T *h] of `depth_attention`, for audits; of several queries for each key with one more axis."""
    return torch.softmax(_scores(q, keys), dim=0)


def _check(name: str, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    if not keys or len(keys) != len(values):
        raise ConfigError(f"{name}: got {len(keys)} keys and {len(values)} values; give one of each per source")


def _scores(q: Tensor, keys: Sequence[Tensor]) -> Tensor:
    wide = q.to(statistics_dtype(q)) / math.sqrt(q.shape[-1])
    return torch.stack([(wide * _for(q, k)).sum(-1) for k in keys])


def _for(q: Tensor, source: Tensor) -> Tensor:
    """The source with an axis for several queries if there are."""
    return source.unsqueeze(-2) if q.ndim > source.ndim else source


def _plain(q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    scores = _scores(q, keys)
    weights = torch.softmax(scores, dim=0).unsqueeze(-1)
    mixed = weights[0] * _for(q, values[0])
    for weight, v in zip(weights[1:], values[1:], strict=True):
        mixed = mixed + weight * _for(q, v)
    return mixed.to(values[0].dtype), torch.logsumexp(scores, dim=0)


class _DepthAttention(torch.autograd.Function):
    """One sweep over the keys and one over the values forward; one over both backward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, sums_up: bool, *sources: Tensor) -> tuple[Tensor, Tensor | None]:
        n = len(sources) // 2
        keys, values = ([_for(q, x) for x in part] for part in (sources[:n], sources[n:]))
        wide = q.to(statistics_dtype(q)) / math.sqrt(q.shape[-1])
        buffer = torch.empty_like(wide)
        scores = torch.stack([torch.mul(wide, k, out=buffer).sum(-1) for k in keys])
        weights = torch.softmax(scores, dim=0)
        mixed = torch.mul(values[0], weights[0].unsqueeze(-1), out=buffer)
        for v, weight in zip(values[1:], weights[1:], strict=True):
            mixed.addcmul_(v, weight.unsqueeze(-1))
        ctx.save_for_backward(q, weights, *sources)
        ctx.set_materialize_grads(False)
        return mixed.to(values[0].dtype), torch.logsumexp(scores, dim=0) if sums_up else None

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        q, weights, *sources = ctx.saved_tensors
        n = len(sources) // 2
        keys, values = ([_for(q, x) for x in part] for part in (sources[:n], sources[n:]))
        mixed, log_sum = grad_outputs
        grad = torch.zeros_like(q, dtype=weights.dtype) if mixed is None else mixed.to(weights.dtype)
        scaled = q.to(weights.dtype) / math.sqrt(q.shape[-1])
        buffer = torch.empty_like(grad)
        by_weight = torch.stack([torch.mul(grad, v, out=buffer).sum(-1) for v in values])
        # Not grad^T y, which would be rounded where y was rounded to a narrower dtype.
        common = (weights * by_weight).sum(0)
        by_score = by_weight.sub_(common if log_sum is None else common - log_sum).mul_(weights)
        grad_q = torch.zeros_like(grad)
        grad_keys, grad_values = [], []
        for k, v, weight, score in zip(keys, values, weights, by_score, strict=True):
            grad_q.addcmul_(score.unsqueeze(-1), k)
            grad_keys.append(_summed(score.unsqueeze(-1), scaled, k, buffer))
            grad_values.append(_summed(weight.unsqueeze(-1), grad, v, buffer))
        return grad_q.div_(math.sqrt(q.shape[-1])).to(q.dtype), None, *grad_keys, *grad_values


def _summed(weight: Tensor, x: Tensor, like: Tensor, buffer: Tensor) -> Tensor:
    """The product, summed over the queries of a group where they share a key."""
    if like.shape == x.shape:
        return (weight * x).to(like.dtype)
    return torch.mul(weight, x, out=buffer).sum(-2).to(like.dtype)
