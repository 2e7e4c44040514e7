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
from twoaxis.ops.cpu import cpu_only
from twoaxis.ops.mix import sum_of_products
from twoaxis.ops.precision import IN_PLAIN_FORMS, outside_autocast, refuse_second_gradients, statistics_dtype

Source = Float[Tensor, "B T H K"]


@outside_autocast
def depth_attention(q: Source, keys: Sequence[Source], values: Sequence[Source]) -> Source:
    """Attends from each token's query to its own keys along depth, with one softmax per head.

    Equation: y = sum_i a_i v_i,  a = softmax_i(q^T k_i / sqrt(K)), per token and head
    Source:   Residual Stream Duality, arXiv:2603.16039, section 2.2; it is causal attention with depth as the position
    Shapes:   softmax in float32 (float64 for float64); y in the dtype of the values, rounded once
    Engines:  on a CPU kernels in C: float32, at most 64 sources. Everything else runs in plain PyTorch
    Cost:     flops 4*K per head, source and token; saves q in the precision of statistics, keys, values and one weight per
              source, head and token

    Raises:
        ConfigError: no source, or not one key per value.

    Example:
        >>> one = torch.ones(1, 1, 1, 2)
        >>> depth_attention(one, [one, one], [one, 3 * one])
        tensor([[[[2., 2.]]]])
    """
    _check("depth_attention", keys, values)
    if cpu_only.serves_attention(q, keys, values):
        return _DepthAttention.apply(q, len(keys), *keys, *values)[0]
    return _mixed(_scores(q, keys), values)


@outside_autocast
def depth_summary(
    q: Float[Tensor, "B T H K"],
    keys: Sequence[Float[Tensor, "B T G K"]],
    values: Sequence[Float[Tensor, "B T G K"]],
) -> tuple[Float[Tensor, "B T H"], Float[Tensor, "B T H K"]]:
    """Sums up keys and values along depth as one key, for a softmax in which others take part too (`local_attention`).

    Equation: score = log sum_i exp(s_i),  value = sum_i softmax_i(s) v_i,  s_i = q^T k_i / sqrt(K), per token and head
    Shapes:   consecutive groups of H/G query heads share a kv-head; the score in float32 (float64 for float64)
    Cost:     that of `depth_attention`; saves one score more per source, head and token

    Raises:
        ConfigError: no source, or not one key per value.

    Example:
        >>> one = torch.ones(1, 1, 1, 1)
        >>> score, value = depth_summary(one, [0 * one, 0 * one], [one, 3 * one])
        >>> score.exp().item(), value.item()
        (2.0, 2.0)
    """
    _check("depth_summary", keys, values)
    if cpu_only.serves_attention(q, keys, values):
        value, score = _DepthAttention.apply(q, len(keys), *keys, *values)
        return score, value
    shape, G = q.shape, keys[0].shape[2]
    q = q if shape[2] == G else q.unflatten(2, (G, -1))
    scores = _scores(q, keys)
    return torch.logsumexp(scores, dim=0).view(shape[:-1]), _mixed(scores, values).view(shape)


@outside_autocast
def depth_attention_weights(q: Float[Tensor, "B T *h K"], keys: Sequence[Float[Tensor, "B T _ K"]]) -> Tensor:
    """The softmax weights [S B T *h] of `depth_attention`, for audits; of several queries for each key with one more axis."""
    return torch.softmax(_scores(q, keys), dim=0)


class _DepthAttention(torch.autograd.Function):
    """In C. Saves its arguments, one score per source, head and token, and one number per head and token."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, n: int, *sources: Tensor) -> tuple[Tensor, Tensor]:
        mixed, scores, log_totals = cpu_only.depth_attention(q, sources[:n], sources[n:])
        ctx.save_for_backward(q, scores, log_totals, *sources)
        ctx.n = n
        ctx.set_materialize_grads(False)
        return mixed, log_totals

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_gradients("depth_attention", IN_PLAIN_FORMS)
        q, scores, log_totals, *sources = ctx.saved_tensors
        grad = torch.zeros_like(q) if grad_outputs[0] is None else grad_outputs[0]
        given = q, sources[: ctx.n], sources[ctx.n :], scores, log_totals
        grad_q, grad_keys, grad_values = cpu_only.depth_attention_backward(grad, grad_outputs[1], *given)
        found = grad_q, None, *grad_keys, *grad_values
        return tuple(one if want else None for one, want in zip(found, ctx.needs_input_grad, strict=True))


def _check(name: str, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    if not keys or len(keys) != len(values):
        raise ConfigError(f"{name}: got {len(keys)} keys and {len(values)} values; give one of each per source")


def _scores(q: Tensor, keys: Sequence[Tensor]) -> Tensor:
    wide = q.to(statistics_dtype(q))
    return torch.stack([(wide * _for(q, k)).sum(-1) for k in keys]) / math.sqrt(q.shape[-1])


def _for(q: Tensor, source: Tensor) -> Tensor:
    """The source with an axis for several queries if there are."""
    return source.unsqueeze(-2) if q.ndim > source.ndim else source


def _mixed(scores: Tensor, values: Sequence[Tensor]) -> Tensor:
    weights = torch.softmax(scores, dim=0).unsqueeze(-1).unbind()
    total = sum_of_products(weights, (_for(weights[0], v) for v in values))
    return total.to(values[0].dtype)
