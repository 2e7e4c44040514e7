"""The rank-one delta write: replace the component of a state along a direction.

Letters: D width, C value channels. Channels are a sequence of separate tensors, as everywhere along depth.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from twoaxis.core.errors import ConfigError
from twoaxis.ops.gpu import delta_operator
from twoaxis.ops.precision import Impl, outside_autocast, refuse_second_gradients, runs_plain, statistics_dtype

UpdateRule = Literal["delta", "write_only"]


def delta_write(
    x: Float[Tensor, "*n D"],
    direction: Float[Tensor, "*n D"],
    target: Float[Tensor, "*n 1"],
    beta: Float[Tensor, "*n 1"],
    eps: float,
    rule: UpdateRule = "delta",
    impl: Impl = "fused",
) -> Float[Tensor, "*n D"]:
    """Moves the component of x along a direction towards a target: `delta_writes` of a single channel."""
    return delta_writes((x,), direction, target.squeeze(-1).unsqueeze(0), beta.squeeze(-1), eps, rule, impl)[0]


@outside_autocast
def delta_writes(
    channels: Sequence[Float[Tensor, "*n D"]],
    direction: Float[Tensor, "*n D"],
    targets: Float[Tensor, "C *n"],
    beta: Float[Tensor, "*n"],
    eps: float,
    rule: UpdateRule = "delta",
    impl: Impl = "fused",
) -> tuple[Float[Tensor, "*n D"], ...]:
    """Moves the component of every channel along one direction towards a target; `write_only` adds without erasing.

    Equation: k = u / sqrt(|u|^2 + eps^2),  x_c' = x_c + beta * k * (v_c - k^T x_c)     (write_only: drop k^T x_c)
    Source:   Deep Delta Learning, arXiv:2601.00417v1, eq. 2.5, with X = [x_1 ... x_C]
    Deviates: the fused engine never forms k: x' = x + a u with a = beta r (v - r u^T x), r = 1/sqrt(|u|^2 + eps^2)
    Engines:  on a GPU kernels, also under `torch.compile`: 16 or 32 bits, at most 4 channels and 8192 numbers per row; on
              a CPU kernels in C in float32, in compiled graphs only with gradients. They save their arguments alone. Everything
              else runs in torch's engine
    Cost:     flops 4*D per row and channel, and 2*D per row; saves the channels, u and a few numbers per row

    Raises:
        ConfigError: no channel, or targets for another number of them.
    """
    if not channels or targets.shape[0] != len(channels):
        raise ConfigError(f"delta_writes: got {len(channels)} channels and {targets.shape[0]} targets; give one target each")
    if impl == "fused" and delta_operator.serves(channels, direction, targets, beta):
        return delta_operator.write(channels, direction, targets, beta, eps, rule == "delta")
    if runs_plain(impl):
        return _plain(channels, direction, targets, beta, eps, rule)
    return _DeltaWrite.apply(direction, targets, beta, eps, rule == "delta", *channels)


def _plain(
    channels: Sequence[Tensor], direction: Tensor, targets: Tensor, beta: Tensor, eps: float, rule: UpdateRule
) -> tuple[Tensor, ...]:
    dtype = statistics_dtype(channels[0])
    k = _unit(direction, eps, dtype)
    written = []
    for x, target in zip(channels, targets, strict=True):
        erased = (k * x.to(dtype)).sum(-1) if rule == "delta" else 0.0
        step = (beta * (target.to(dtype) - erased)).unsqueeze(-1)
        written.append((x.to(dtype) + step * k).to(x.dtype))
    return tuple(written)


def _unit(direction: Float[Tensor, "*n D"], eps: float, dtype: torch.dtype) -> Float[Tensor, "*n D"]:
    u = direction.to(dtype)
    return u * torch.rsqrt((u * u).sum(-1, keepdim=True) + eps * eps)


@outside_autocast
def components(
    channels: Sequence[Float[Tensor, "*n D"]], direction: Float[Tensor, "*n D"], eps: float
) -> Float[Tensor, "C *n"]:
    """The component k^T x of every channel along a direction, for audits."""
    k = _unit(direction, eps, statistics_dtype(channels[0]))
    return torch.stack([(k * x.to(k.dtype)).sum(-1) for x in channels])


# Measured, a training step with the plain form: 1.02 of the time, 1.10 of the saved bytes in float32, 1.46 in bfloat16.
class _DeltaWrite(torch.autograd.Function):
    """With p = u^T x and c = d(a)/d(p): x' = x + a u, so dx = g + c (g^T u) u, and u gets a g + (g^T u)(c x + da/dr dr/du)."""

    @staticmethod
    def forward(
        ctx: Any, u: Tensor, targets: Tensor, beta: Tensor, eps: float, erases: bool, *channels: Tensor
    ) -> tuple[Tensor, ...]:
        dtype = statistics_dtype(channels[0])
        factor = torch.linalg.vector_norm(u, dim=-1, dtype=dtype).square_().add_(eps * eps).rsqrt_()
        wide_u = u.to(dtype)
        products = torch.zeros_like(targets, dtype=dtype)
        written = []
        for x, target, product in zip(channels, targets, products, strict=True):
            # The result's buffer holds the products of the row first.
            buffer = torch.empty_like(x, dtype=dtype)
            if erases:
                torch.sum(torch.mul(x, wide_u, out=buffer), -1, out=product)
            step = (target - factor * product).mul_(beta).mul_(factor)
            written.append(torch.addcmul(x.to(dtype), step.unsqueeze(-1), wide_u, out=buffer).to(x.dtype))
        ctx.save_for_backward(u, targets, beta, factor, products, *channels)
        ctx.erases = erases
        return tuple(written)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_gradients("delta_writes")
        u, targets, beta, factor, products, *channels = ctx.saved_tensors
        wide_u = u.to(factor.dtype)
        buffer, grad_u = torch.empty_like(u, dtype=factor.dtype), torch.empty_like(u, dtype=factor.dtype)
        grad_targets = torch.empty_like(targets)
        grad_beta, by_factor = torch.zeros_like(factor), torch.zeros_like(factor)
        grad_channels = []
        for c, (narrow, x, target, product) in enumerate(zip(grad_outputs, channels, targets, products, strict=True)):
            grad = narrow.to(factor.dtype)
            error = target - factor * product
            grad_step = torch.mul(grad, wide_u, out=buffer).sum(-1)
            moved = (beta * error).mul_(factor).unsqueeze(-1)
            if c == 0:
                torch.mul(grad, moved, out=grad_u)
            else:
                grad_u.addcmul_(grad, moved)
            torch.mul(grad_step, beta * factor, out=grad_targets[c])
            grad_beta.addcmul_(grad_step, error * factor)
            by_factor.addcmul_(grad_step, error.addcmul_(factor, product, value=-1))
            if ctx.erases:
                along = (grad_targets[c] * factor).unsqueeze(-1)
                grad_u.addcmul_(along, x, value=-1)
                grad = torch.addcmul(grad, along, wide_u, value=-1)
            grad_channels.append(grad.to(x.dtype))
        grad_u.addcmul_((by_factor * beta * factor.pow(3)).unsqueeze(-1), wide_u, value=-1)
        return grad_u.to(u.dtype), grad_targets, grad_beta.to(beta.dtype), None, None, *grad_channels
