"""The rank-one delta write: replace the component of a state along a direction.

Letters: D width.
"""

from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from twoaxis.ops.precision import Impl, outside_autocast, runs_plain, statistics_dtype

UpdateRule = Literal["delta", "write_only"]


@outside_autocast
def delta_write(
    x: Float[Tensor, "*n D"],
    direction: Float[Tensor, "*n D"],
    target: Float[Tensor, "*n 1"],
    beta: Float[Tensor, "*n 1"],
    eps: float,
    rule: UpdateRule = "delta",
    impl: Impl = "fused",
) -> Float[Tensor, "*n D"]:
    """Moves the component of x along a direction towards a target; `write_only` adds without erasing.

    Equation: k = u / sqrt(|u|^2 + eps^2),  x' = x + beta * k * (v - k^T x)     (write_only: drop k^T x)
    Source:   Deep Delta Learning, arXiv:2601.00417v1, eq. 2.5 with d_v = 1
    Deviates: the fused engine never forms k: x' = x + a u with a = beta r (v - r u^T x), r = 1/sqrt(|u|^2 + eps^2)
    Cost:     flops 6*D per row; saves x, u and a few numbers per row
    """
    if runs_plain(impl):
        wide, u = x.to(statistics_dtype(x)), direction.to(statistics_dtype(x))
        k = u * torch.rsqrt((u * u).sum(-1, keepdim=True) + eps * eps)
        erased = (k * wide).sum(-1, keepdim=True) if rule == "delta" else 0.0
        return (wide + beta * (target - erased) * k).to(x.dtype)
    return _DeltaWrite.apply(x, direction, target, beta, eps, rule == "delta")


class _DeltaWrite(torch.autograd.Function):
    """With p = u^T x and c = d(a)/d(p): x' = x + a u, so dx = g + c (g^T u) u, and u gets a g + (g^T u)(c x + da/dr dr/du)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, u: Tensor, target: Tensor, beta: Tensor, eps: float, erases: bool) -> Tensor:
        dtype = statistics_dtype(x)
        norm = torch.linalg.vector_norm(u, dim=-1, keepdim=True, dtype=dtype)
        factor = torch.rsqrt(norm.square_().add_(eps * eps))
        buffer = torch.empty_like(x, dtype=dtype)
        wide_x, wide_u = x.to(dtype), u.to(dtype)
        product = torch.mul(wide_x, wide_u, out=buffer).sum(-1, keepdim=True) if erases else torch.zeros_like(factor)
        step = beta * (target - factor * product) * factor
        ctx.save_for_backward(x, u, target, beta, factor, product)
        ctx.erases = erases
        return torch.addcmul(wide_x, step, wide_u, out=buffer).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x, u, target, beta, factor, product = ctx.saved_tensors
        grad = grad_outputs[0].to(factor.dtype)
        wide_x, wide_u = x.to(factor.dtype), u.to(factor.dtype)
        error = target - factor * product
        buffer = torch.empty_like(x, dtype=factor.dtype)
        grad_step = torch.mul(grad, wide_u, out=buffer).sum(-1, keepdim=True)
        by_factor = beta * (error - factor * product)
        grad_u = torch.mul(grad, beta * error * factor, out=buffer)
        grad_u.addcmul_(grad_step * by_factor * factor.pow(3), wide_u, value=-1)
        grad_x = grad
        if ctx.erases:
            along = grad_step * beta * factor.square()
            grad_u.addcmul_(along, wide_x, value=-1)
            grad_x = torch.addcmul(grad, along, wide_u, value=-1)
        grad_target, grad_beta = grad_step * beta * factor, grad_step * error * factor
        return grad_x.to(x.dtype), grad_u.to(u.dtype), grad_target, grad_beta, None, None
