"""Weighted sums of depth sources, for one or several readers, and of the heads of all sources.

Sources are a sequence of separate tensors: a stack would copy the whole history at every read, and autograd would keep every
copy.

Letters: B batch, T position, D width, H heads, S depth sources, C ways (results).
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from twoaxis.core import measure
from twoaxis.core.errors import ConfigError
from twoaxis.ops.causal_conv import causal_conv_sum
from twoaxis.ops.cpu import cpu_only
from twoaxis.ops.gpu import stream_operator
from twoaxis.ops.precision import Impl, outside_autocast, runs_plain, statistics_dtype


def by_head(x: Tensor, n_heads: int) -> Tensor:
    """Reshapes [* D] to [* H D/H]; one head needs no axis."""
    return x if n_heads == 1 else x.unflatten(-1, (n_heads, -1))


def spread(weight: Tensor) -> Tensor:
    """Aligns [* H] with the result of `by_head`."""
    return weight if weight.shape[-1] == 1 else weight.unsqueeze(-1)


def head_sums(x: Tensor, n_heads: int) -> Tensor:
    """Returns the sum over each head: [* H]."""
    return x.sum(-1, keepdim=True) if n_heads == 1 else by_head(x, n_heads).sum(-1)


def sum_of_products(weights: Iterable[Tensor], values: Iterable[Tensor]) -> Tensor:
    """Adds up values times weights of matching axes one after the other, so that no product is kept beside the sum."""
    (weight, value), *others = zip(weights, values, strict=True)
    total = weight * value
    for weight, value in others:
        total = torch.addcmul(total, weight, value)
    return total


@outside_autocast
def mix(sources: Sequence[Float[Tensor, "B T D"]], weights: Float[Tensor, "C S *each"]) -> tuple[Float[Tensor, "B T D"], ...]:
    """Returns one weighted sum of the sources for each way.

    Equation: y_c = sum_s w_cs * v_s, with w_cs one number, one per token ("B T") or one per feature ("D")
    Shapes:   weights in the precision of statistics; each y_c in the dtype of the sources, rounded once
    Engines:  on a CPU kernels in C: float32, at most 64 sources and ways. Everything else runs in plain PyTorch
    Cost:     flops 2*D per source, way and token; saves the sources and the weights

    Raises:
        ConfigError: no source, or weights for another number of sources.

    Example:
        >>> v = torch.ones(1, 1, 2), torch.full((1, 1, 2), 10.0)
        >>> mix(v, torch.tensor([[1.0, 2.0], [0.5, 0.0]]))
        (tensor([[[21., 21.]]]), tensor([[[0.5000, 0.5000]]]))
    """
    if not sources or weights.shape[1] != len(sources):
        raise ConfigError(f"mix: got {len(sources)} sources and weights for {weights.shape[1]}; give one weight per source")
    if sources[0].device.type == "cpu":
        by_source = weights.transpose(0, 1)
        if stream_operator.serves(sources, None, by_source, None, 1):
            return stream_operator.mix(sources, None, by_source, None)
        # A weight per feature is a convolution with one tap.
        ways = weights.unsqueeze(-1).unbind()
        if all(cpu_only.serves_conv(sources, taps, None) for taps in ways):
            return tuple(causal_conv_sum(sources, taps) for taps in ways)
    rows = [way.unbind() for way in weights.to(statistics_dtype(sources[0])).unbind()]
    totals = [sources[0] * _aligned(way[0]) for way in rows]
    computed = measure.ways(range(len(rows)))
    for s, v in enumerate(sources[1:], start=1):
        for c in computed:
            totals[c] = torch.addcmul(totals[c], v, _aligned(rows[c][s]))
    return tuple(total.to(sources[0].dtype) for total in totals)


def _aligned(weight: Tensor) -> Tensor:
    """One per feature as it is; one number or one per token with an axis for the features."""
    # Type promotion ignores a tensor without axes: products with a half-precision source would stay in its precision.
    return weight if weight.ndim == 1 else weight.unsqueeze(-1)


@outside_autocast
def mix_heads(
    sources: Sequence[Float[Tensor, "B T H D"]], weights: Float[Tensor, "C SH"], impl: Impl = "fused"
) -> Float[Tensor, "B T C D"]:
    """Returns weighted sums of the heads of all sources, one matrix product for each source.

    Equation: y_c = sum_s sum_h w_c(s,h) * v_sh, weights of one source beside each other
    Shapes:   sums in the precision of statistics; y in the dtype of the sources, rounded once. A source whose memory goes head
              by head, as that of `head_by_head`, is not copied
    Cost:     flops 2*C*D per source, head and token; saves the sources and the weights; `reference` saves sources in half
              precision once more, as float32

    Raises:
        ConfigError: no source, weights for another number of heads, or an unknown engine.

    Example:
        >>> v = torch.tensor([[[[1.0, 2.0], [10.0, 20.0]]]])
        >>> mix_heads([v, v], torch.tensor([[1.0, 0.0, 0.5, 0.5]]))
        tensor([[[[ 6.5000, 13.0000]]]])
    """
    if not sources or weights.shape[1] != len(sources) * sources[0].shape[2]:
        heads = sum(source.shape[2] for source in sources)
        raise ConfigError(f"mix_heads: got {heads} heads and weights for {weights.shape[1]}; give one weight per head")
    if runs_plain(impl):
        return _sum_of_heads(weights, sources)
    return _MixHeads.apply(weights, *sources)


def head_by_head(x: Tensor) -> Tensor:
    """The same [B T H D], with the numbers of one head beside each other in memory."""
    return x.movedim(2, 0).contiguous().movedim(0, 2)


def _rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[B T H D] as a matrix with one row for each head."""
    return x.movedim(2, 0).flatten(1).to(dtype)


def _heads(rows: Tensor, like: Tensor) -> Tensor:
    """The inverse of `_rows`, for a tensor that differs in its number of heads alone."""
    batch, tokens, _, width = like.shape
    return rows.view(rows.shape[0], batch, tokens, width).movedim(0, 2).to(like.dtype)


def _sum_of_heads(weights: Tensor, sources: Sequence[Tensor]) -> Tensor:
    dtype = statistics_dtype(sources[0])
    first, *others = zip(weights.to(dtype).chunk(len(sources), dim=1), sources, strict=True)
    total = first[0] @ _rows(first[1], dtype)
    for weight, source in others:
        total = torch.addmm(total, weight, _rows(source, dtype))
    return _heads(total, sources[0])


class _MixHeads(torch.autograd.Function):
    """Saves sources in their own precision; its backward pass is made of operations that autograd differentiates."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, *sources: Tensor) -> Tensor:
        ctx.save_for_backward(weights, *sources)
        return _sum_of_heads(weights, sources)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (weights, *sources) = grad_outputs, ctx.saved_tensors
        dtype = statistics_dtype(grad)
        rows = _rows(grad, dtype)
        of_weights = None
        if ctx.needs_input_grad[0]:
            of_weights = torch.cat([rows @ _rows(source, dtype).T for source in sources], dim=1).to(weights.dtype)
        parts = weights.to(dtype).chunk(len(sources), dim=1)
        wanted = ctx.needs_input_grad[1:]
        of_sources = [
            _heads(part.T @ rows, source) if one else None for part, source, one in zip(parts, sources, wanted, strict=True)
        ]
        return of_weights, *of_sources
