"""Low-rank sums: an update, the stream, and low-rank maps of one or several sources, weighted and added at once.

Letters: B batch, T position, D width, S sources, R rank of one map, M maps (1 for all sources, or S),
N = B T tokens.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from twoaxis.core.errors import ConfigError
from twoaxis.ops.precision import Impl, outside_autocast, runs_plain, statistics_dtype


@outside_autocast
def low_rank_sum(
    update: Float[Tensor, "B T D"],
    sources: Sequence[Float[Tensor, "B T D"]],
    scales: Float[Tensor, " two"],
    weights: Float[Tensor, " S"],
    down: Float[Tensor, "MR D"],
    up: Float[Tensor, "D MR"],
    n_maps: int = 1,
    impl: Impl = "fused",
) -> Float[Tensor, "B T D"]:
    """Adds the update, the last source, and a low-rank map of each source.

    Equation: y = a u + b x_S + sum_j w_j U_j V_j x_j,  (a, b) the scales, with one pair U, V for all sources or one for each
    Source:   LAuReL, arXiv:2411.07501, eq. 3-6
    Shapes:   scales and weights in the precision of statistics; products with maps in the dtype of the sources; y in it, too
    Cost:     matrix product flops 2*R*D per source and token and 2*M*R*D per token, 4*D more per token; saves the sources,
              the parameters, R numbers per source and token, and the update when the scales are learned

    Raises:
        ConfigError: no source, or weights or maps for another number of sources.

    Example:
        >>> x, down = torch.tensor([[[1.0, 2.0]]]), torch.tensor([[1.0, 1.0]])
        >>> low_rank_sum(x, [x], torch.ones(2), torch.ones(1), down, torch.tensor([[10.0], [0.0]]))
        tensor([[[32.,  4.]]])
    """
    S = len(sources)
    if not sources or weights.shape[0] != S or n_maps not in (1, S):
        counts = f"{S} sources, {weights.shape[0]} weights and {n_maps} maps"
        raise ConfigError(f"low_rank_sum: got {counts}; give one weight per source, and one map per source or in all")
    if runs_plain(impl):
        dtype = statistics_dtype(update)
        return _plain(update, sources, scales.to(dtype), weights.to(dtype), down, up, n_maps)
    return _LowRankSum.apply(update, scales, weights, down, up, n_maps, *sources)


def _plain(
    update: Tensor, sources: Sequence[Tensor], scales: Tensor, weights: Tensor, down: Tensor, up: Tensor, n_maps: int
) -> Tensor:
    maps = down.chunk(n_maps)
    hidden = [F.linear(x, maps[j % n_maps]) for j, x in enumerate(sources)]
    mapped = F.linear(_weighted(hidden, weights, n_maps).to(update.dtype), up)
    return (scales[:1] * update + scales[1:] * sources[-1] + mapped).to(update.dtype)


def _weighted(hidden: Sequence[Tensor], weights: Tensor, n_maps: int) -> Tensor:
    """The hidden features of all sources, concatenated for separate maps and added for a shared one."""
    parts = [h * weights[j : j + 1] for j, h in enumerate(hidden)]
    return sum(parts[1:], parts[0]) if n_maps == 1 else torch.cat(parts, dim=-1)


class _LowRankSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, update: Tensor, scales: Tensor, weights: Tensor, down: Tensor, up: Tensor, n_maps: int, *sources: Tensor
    ) -> Tensor:
        D, dtype = update.shape[-1], statistics_dtype(update)
        maps, (a, b) = down.chunk(n_maps), scales.to(dtype).chunk(2)
        hidden = [torch.mm(x.reshape(-1, D), maps[j % n_maps].T) for j, x in enumerate(sources)]
        joined = _weighted(hidden, weights.to(dtype), n_maps).to(update.dtype)
        total = torch.mul(update, a).addcmul_(sources[-1], b).view(-1, D)
        if total.dtype == update.dtype:
            torch.addmm(total, joined, up.T, out=total)
        else:
            total.add_(torch.mm(joined, up.T))
        # The update is only needed for the gradient of its scale.
        ctx.save_for_backward(update if ctx.needs_input_grad[1] else None, scales, weights, down, up, *sources, *hidden)
        ctx.n_maps = n_maps
        return total.view(update.shape).to(update.dtype)

    @staticmethod
    @outside_autocast
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """With g the gradient of y and q_j = U_j^T g: dw_j = q_j^T V_j x_j, dx_j = w_j V_j^T q_j, and b g more for the last."""
        (grad,) = grad_outputs
        update, scales, weights, down, up, *rest = ctx.saved_tensors
        n_maps, S, D = ctx.n_maps, len(rest) // 2, grad.shape[-1]
        sources, hidden = rest[:S], rest[S:]
        dtype = statistics_dtype(grad)
        rows, wide_grad, wide_weights, (a, b) = (
            grad.reshape(-1, D),
            grad.to(dtype),
            weights.to(dtype),
            scales.to(dtype).chunk(2),
        )
        grad_up = torch.mm(rows.T, _weighted(hidden, wide_weights, n_maps).to(grad.dtype))
        back = torch.mm(rows, up).chunk(n_maps, dim=1)
        maps, grad_down = down.chunk(n_maps), torch.zeros_like(down)
        grad_maps = grad_down.chunk(n_maps)
        grad_weights = torch.empty_like(wide_weights)
        grad_sources: list[Tensor | None] = []
        for j, (x, h) in enumerate(zip(sources, hidden, strict=True)):
            q = back[j % n_maps].to(dtype)
            grad_weights[j] = (q * h).sum()
            weighted = (q * wide_weights[j : j + 1]).to(grad.dtype)
            grad_maps[j % n_maps].add_(torch.mm(weighted.T, x.reshape(-1, D)))
            if not ctx.needs_input_grad[6 + j]:
                grad_sources.append(None)
                continue
            grad_x = torch.mm(weighted, maps[j % n_maps]).view(x.shape)
            if j == S - 1:
                grad_x = torch.addcmul(grad_x.to(dtype), wide_grad, b)
            grad_sources.append(grad_x.to(x.dtype))
        grad_scales = None
        if update is not None:
            flat = wide_grad.reshape(-1)
            grad_scales = torch.stack([torch.dot(flat, x.to(dtype).reshape(-1)) for x in (update, sources[-1])]).to(
                scales.dtype
            )
        grad_update = (wide_grad * a).to(grad.dtype)
        return grad_update, grad_scales, grad_weights.to(weights.dtype), grad_down, grad_up, None, *grad_sources
