"""Interpolation of two tensors: by a gate per head, or by a weight that starts at 0 and is scheduled or learned.

Letters: B batch, T position, D width, G heads, K head width.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from twoaxis.core.cost import Cost, Shape
from twoaxis.core.parameters import Constant, DeclaredModule
from twoaxis.ops.precision import outside_autocast, statistics_dtype


def blend_parameter(module: DeclaredModule) -> nn.Parameter:
    """Declares the weight of the attribute `blend`; it starts at 0, where the blend is the plain tensor."""
    return module.parameter("blend", (1,), Constant(0.0), "mixing", stacked=1)


@outside_autocast
def annealed(plain: Float[Tensor, "*n D"], other: Float[Tensor, "*n D"], weight: Float[Tensor, "1"]) -> Float[Tensor, "*n D"]:
    """Interpolates between two tensors; at weight 0 the result is exactly the first.

    Equation: y = plain + g (other - plain), in the precision of statistics, rounded once

    Example:
        >>> import torch
        >>> annealed(torch.zeros(2), torch.ones(2), torch.tensor([0.25]))
        tensor([0.2500, 0.2500])
    """
    dtype = statistics_dtype(plain)
    start = plain.to(dtype)
    return (start + weight.to(dtype) * (other.to(dtype) - start)).to(plain.dtype)


def blend_cost(shape: Shape, width: int) -> Cost:
    """Counts a blend of two states and the plain sum."""
    return Cost(params=1, elementwise_flops=4 * shape.total_tokens * width)


@outside_autocast
def blend(
    start: Float[Tensor, "B T G K"], end: Float[Tensor, "B T G K"], gate: Float[Tensor, "B T G"]
) -> Float[Tensor, "B T G K"]:
    """Interpolates between two tensors, with one gate per head.

    Equation: y = start + g (end - start)
    Shapes:   gates in the precision of statistics; y in the dtype of the two, rounded once
    Cost:     flops 3*G*K per token; saves the two and the gates in the precision of statistics

    Example:
        >>> blend(torch.zeros(1, 1, 1, 2), torch.ones(1, 1, 1, 2), torch.full((1, 1, 1), 0.25)).flatten()
        tensor([0.2500, 0.2500])
    """
    dtype = statistics_dtype(start)
    return torch.lerp(start.to(dtype), end.to(dtype), gate.to(dtype).unsqueeze(-1)).to(end.dtype)
