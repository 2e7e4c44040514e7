"""The product of every row with one weight vector, and of the rows with one number each.

Letters: B batch, T position, D width.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from twoaxis.ops.precision import Impl, outside_autocast, runs_plain, statistics_dtype


@outside_autocast
def row_product(x: Float[Tensor, "B T D"], weight: Float[Tensor, " D"], impl: Impl = "fused") -> Float[Tensor, "B T"]:
    """Returns x w for every token, in the statistics precision.

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
