"""Linear scores: a few numbers per token, linear in it, in the precision of statistics.

Letters: B batch, T position, D width, C scores.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from twoaxis.ops.precision import Impl, outside_autocast, runs_plain, statistics_dtype


@outside_autocast
def linear_scores(x: Float[Tensor, "B T D"], weight: Float[Tensor, "C D"], impl: Impl = "fused") -> Float[Tensor, "C B T"]:
    """Multiplies each token with each row of a weight; the scores of one row stand together.

    Cost: matrix product flops 2*C*D per token; saves x and the weight

    Example:
        >>> linear_scores(torch.tensor([[[1.0, 2.0]]]), torch.eye(2)).flatten()
        tensor([1., 2.])
    """
    if runs_plain(impl):
        dtype = statistics_dtype(x)
        return (x.to(dtype) @ weight.to(dtype).T).permute(2, 0, 1)
    return _LinearScores.apply(x, weight)


class _LinearScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        dtype = statistics_dtype(x)
        return torch.mm(weight.to(dtype), x.reshape(-1, x.shape[-1]).to(dtype).T).view(-1, *x.shape[:2])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor]:
        x, weight = ctx.saved_tensors
        return _gradients(x, weight, grad_outputs[0].flatten(1), ctx.needs_input_grad[0])


@outside_autocast
def _gradients(x: Tensor, weight: Tensor, grad: Tensor, wants_x: bool) -> tuple[Tensor | None, Tensor]:
    grad_weight = torch.mm(grad, x.reshape(-1, x.shape[-1]).to(grad.dtype)).to(weight.dtype)
    grad_x = torch.mm(grad.T, weight.to(grad.dtype)).view(x.shape).to(x.dtype) if wants_x else None
    return grad_x, grad_weight
