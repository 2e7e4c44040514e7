"""Weighted sums of sources along depth, for one or several readers in one sweep.

Letters: B batch, T position, D width, S sources, C ways (results). Sources are a sequence of separate tensors: a stack
would copy the whole history at every read, and autograd would keep every copy.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from twoaxis.core.errors import ConfigError
from twoaxis.core.measure import ways
from twoaxis.ops.precision import Impl, outside_autocast, runs_plain, statistics_dtype

NUMBERS_IN_CACHE = 2**16
"""Of one source at a time, in the backward pass of many ways."""


@outside_autocast
def mix(
    sources: Sequence[Float[Tensor, "B T D"]], weights: Float[Tensor, "C S *each"], impl: Impl = "fused"
) -> tuple[Float[Tensor, "B T D"], ...]:
    """Returns one weighted sum of the sources for each way.

    Equation: y_c = sum_s w_cs * v_s, with w_cs one number, one per token ("B T") or one per feature ("D")
    Shapes:   weights in the precision of statistics; each y_c in the dtype of the sources, rounded once
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
    if runs_plain(impl):
        wide = weights.to(statistics_dtype(sources[0]))
        return tuple(_plain(sources, way) for way in wide)
    return _Mix.apply(weights, *sources)


def _plain(sources: Sequence[Tensor], weights: Tensor) -> Tensor:
    total = _aligned(weights[0]) * sources[0]
    for v, weight in zip(sources[1:], weights[1:], strict=True):
        total = total + _aligned(weight) * v
    return total.to(sources[0].dtype)


def _aligned(weight: Tensor) -> Tensor:
    """One per feature as it is; one number or one per token with an axis for the features."""
    # A number without an axis would leave products with a half-precision source in its precision.
    return weight if weight.ndim == 1 else weight.unsqueeze(-1)


class _Mix(torch.autograd.Function):
    """One buffer per way in the forward pass, one sweep over the sources in the backward pass."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, *sources: Tensor) -> tuple[Tensor, ...]:
        wide = weights.to(statistics_dtype(sources[0]))
        ctx.save_for_backward(weights, *sources)
        totals = [torch.mul(sources[0], _aligned(way[0])) for way in wide]
        computed = ways(zip(totals, wide, strict=True))
        for s, v in enumerate(sources[1:], start=1):
            for total, way in computed:
                total.addcmul_(v, _aligned(way[s]))
        return tuple(total.to(sources[0].dtype) for total in totals)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        weights, *sources = ctx.saved_tensors
        wide = weights.to(statistics_dtype(sources[0]))
        if wide.ndim == 4 and len(wide) > 2 and wide.device.type == "cpu":
            by_weight, by_source = _by_token(wide, grad_outputs, sources)
            return by_weight.to(weights.dtype), *by_source
        grads = [grad.to(wide.dtype) for grad in grad_outputs]
        grad_weights = torch.empty_like(wide) if ctx.needs_input_grad[0] else None
        buffer = torch.empty_like(grads[0]) if wide.ndim > 2 else None
        grad_sources: list[Tensor | None] = []
        for s, v in enumerate(sources):
            if grad_weights is not None:
                for c, grad in enumerate(grads):
                    grad_weights[c, s] = _weight_gradient(grad, v, wide.ndim, buffer)
            if not ctx.needs_input_grad[1 + s]:
                grad_sources.append(None)
                continue
            grad_v = grads[0] * _aligned(wide[0, s])
            for grad, way in zip(grads[1:], wide[1:], strict=True):
                grad_v.addcmul_(grad, _aligned(way[s]))
            grad_sources.append(grad_v.to(v.dtype))
        return None if grad_weights is None else grad_weights.to(weights.dtype), *grad_sources


@outside_autocast
def _by_token(wide: Tensor, grads: Sequence[Tensor], sources: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Both gradients as one small matrix product per token each: dW = G V^T and dV = W^T G.

    With several ways a product reuses what it has loaded, which outweighs setting sources side by side, some rows at a time.
    """
    (C, S), D = wide.shape[:2], sources[0].shape[-1]
    given, results = [v.reshape(-1, D) for v in sources], [g.reshape(-1, D) for g in grads]
    N = len(given[0])
    rows = max(1, min(N, NUMBERS_IN_CACHE // D))
    by_row = wide.flatten(2).permute(2, 1, 0).contiguous()
    grad_weights = wide.new_empty(N, C, S)
    grad_sources = [torch.empty(v.shape, dtype=v.dtype, device=v.device) for v in given]
    V, G = wide.new_empty(rows, S, D), wide.new_empty(rows, C, D)
    for start in range(0, N, rows):
        piece = slice(start, min(start + rows, N))
        v, g = V[: piece.stop - start], G[: piece.stop - start]
        for s, source in enumerate(given):
            v[:, s].copy_(source[piece])
        for c, result in enumerate(results):
            g[:, c].copy_(result[piece])
        torch.bmm(g, v.transpose(1, 2), out=grad_weights[piece])
        torch.bmm(by_row[piece], g, out=v)
        for s, grad_source in enumerate(grad_sources):
            grad_source[piece].copy_(v[:, s])
    shaped = [grad.view(v.shape) for grad, v in zip(grad_sources, sources, strict=True)]
    return grad_weights.permute(1, 2, 0).reshape(wide.shape), shaped


def _weight_gradient(grad: Tensor, v: Tensor, ndim: int, buffer: Tensor | None) -> Tensor:
    if ndim == 2:
        return torch.dot(grad.reshape(-1), v.to(grad.dtype).reshape(-1))
    product = torch.mul(grad, v, out=buffer)
    return product.sum(-1) if ndim == 4 else product.sum((0, 1))
