"""The gate of an n-gram table: how much of what a table says enters the stream, by the stream itself.

Letters: D width, M parallel streams, one where there is no such axis.
"""

import math
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from twoaxis.ops.norm import inverse_rms
from twoaxis.ops.precision import Impl, outside_autocast, refuse_second_gradients, runs_plain, statistics_dtype

AtZero = Literal["sign", "copysign"]
"""The root at a score of 0: 0, or that of `SMALLEST` with the sign of the zero."""

SMALLEST = 1e-6
"""Scores nearer to 0 have the root of this, and no gradient."""


def table_rows(table: Float[Tensor, "R W"], rows: Int[Tensor, "*n C"]) -> Float[Tensor, "*n C W"]:
    """Looks up rows of a table.

    Cost: no flops; saves the row numbers; the gradient has the size of the table
    """
    if rows.device.type == "cuda":
        return torch.nn.functional.embedding(rows, table)
    # The gradient of an embedding takes three times as long on a CPU.
    return table.index_select(0, rows.flatten()).unflatten(0, rows.shape)


def signed_root(scores: Float[Tensor, "*n"], at_zero: AtZero = "sign") -> Float[Tensor, "*n"]:
    """Returns sign(a) sqrt(max(|a|, 1e-6)), which keeps scores of a wide range apart in a sigmoid.

    Example:
        >>> signed_root(torch.tensor([4.0, 0.0, -9.0]))
        tensor([ 2.,  0., -3.])
    """
    root = scores.abs().clamp(min=SMALLEST).sqrt()
    return torch.copysign(root, scores) if at_zero == "copysign" else root * scores.sign()


@outside_autocast
def ngram_gate(
    query: Float[Tensor, "*n D"],
    key: Float[Tensor, "*n D"],
    gain: Float[Tensor, "*m D"],
    value: Float[Tensor, "*k D"],
    eps: float,
    at_zero: AtZero = "sign",
    impl: Impl = "fused",
) -> Float[Tensor, "*n D"]:
    """Scales a value by a gate that compares a key with a query.

    Equation: u = sigmoid(root(a)) v,  a = <q, gain k / rms(k)> / sqrt(D),  root(a) = sign(a) sqrt(max(|a|, 1e-6))
    Source:   deepseek-ai/Engram, engram_demo_v1.py @ fb7f84a, Engram.forward; arXiv:2601.07372, eq. 4, has no root
    Cost:     flops 8*D per token and stream; saves its inputs and two numbers per token and stream

    Args:
        query: normalised already; with M streams [B T M D].
        key: as the query.
        gain: of the norm of keys, [D] or [M D].
        value: as the query, or [B T 1 D] for all streams.
        eps: of the norm of keys.
        at_zero: the gate at a score of 0: `sign` is 0.5, `copysign` 0.50025.
        impl: `fused` or `reference`.

    Example:
        >>> one = torch.ones(1, 1, 4)
        >>> ngram_gate(one, one, torch.ones(4), one, eps=1e-6)[0, 0, 0]
        tensor(0.8044)
    """
    if runs_plain(impl):
        gate = torch.sigmoid(signed_root(ngram_scores(query, key, gain, eps), at_zero))
        return (gate.unsqueeze(-1) * value.to(gate.dtype)).to(value.dtype)
    return _NgramGate.apply(query, key, gain, value, eps, at_zero)


def ngram_scores(
    query: Float[Tensor, "*n D"], key: Float[Tensor, "*n D"], gain: Float[Tensor, "*m D"], eps: float
) -> Float[Tensor, "*n"]:
    """The scores a of `ngram_gate`, in the precision of statistics."""
    dtype = statistics_dtype(key)
    wide = key.to(dtype)
    normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * gain.to(dtype)
    return (query.to(dtype) * normal).sum(-1) / math.sqrt(key.shape[-1])


# Measured, a training step with the plain form: 1.02 of the time, 1.08 of the saved bytes in float32, 1.27 in bfloat16.
class _NgramGate(torch.autograd.Function):
    """Saves no gated key: both products of the backward pass are made again."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, gain: Tensor, value: Tensor, eps: float, at_zero: AtZero) -> Tensor:
        factor = inverse_rms(key, eps)
        scores = _product(query, key, factor.dtype).mul_(gain.to(factor.dtype)).sum(-1)
        scores.mul_(factor).div_(math.sqrt(key.shape[-1]))
        ctx.save_for_backward(query, key, gain, value, factor, scores)
        ctx.at_zero = at_zero
        gate = torch.sigmoid(signed_root(scores, at_zero)).unsqueeze(-1)
        return (gate * value).to(value.dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_gradients("ngram_gate")
        query, key, gain, value, factor, scores = ctx.saved_tensors
        dtype, D = factor.dtype, key.shape[-1]
        grad, wide_gain = grad_outputs[0].to(dtype), gain.to(dtype)
        gate = torch.sigmoid(signed_root(scores, ctx.at_zero))
        slope = torch.where(scores.abs() >= SMALLEST, 0.5 * scores.abs().clamp(min=SMALLEST).rsqrt(), 0.0)
        by_score = (grad * value).sum(-1).mul_(gate).mul_(1 - gate).mul_(slope)
        # Of the product of query and gained key, before its division by the norm of the key.
        by_product = (by_score * factor).div_(math.sqrt(D)).unsqueeze(-1)
        grad_value = (grad * gate.unsqueeze(-1)).sum_to_size(value.shape)
        grad_gain = (_product(query, key, dtype) * by_product).sum_to_size(gain.shape)
        along_key = (by_score * scores * factor.square()).div_(-D).unsqueeze(-1)
        grad_key = (query.to(dtype) * wide_gain).mul_(by_product).addcmul_(along_key, key.to(dtype))
        grad_query = (key.to(dtype) * wide_gain).mul_(by_product)
        return (
            grad_query.to(query.dtype),
            grad_key.to(key.dtype),
            grad_gain.to(gain.dtype),
            grad_value.to(value.dtype),
            None,
            None,
        )


def _product(query: Tensor, key: Tensor, dtype: torch.dtype) -> Tensor:
    """The product in a wide buffer of its own."""
    return torch.mul(query.to(dtype), key)
