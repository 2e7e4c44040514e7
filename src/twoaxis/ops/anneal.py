"""A blend from the plain model to another one, by a weight that starts at 0: a schedule moves it, or training learns it.

Letters: D width.
"""

from jaxtyping import Float
from torch import Tensor, nn

from twoaxis.core.cost import Cost, Shape
from twoaxis.core.parameters import Constant, DeclaredModule
from twoaxis.ops.precision import outside_autocast, statistics_dtype


def blend_parameter(module: DeclaredModule) -> nn.Parameter:
    """The weight to assign to the attribute `blend`; it starts at 0, where nothing has changed yet."""
    return module.parameter("blend", (1,), Constant(0.0), "mixing")


@outside_autocast
def annealed(plain: Float[Tensor, "*n D"], other: Float[Tensor, "*n D"], weight: Float[Tensor, "1"]) -> Float[Tensor, "*n D"]:
    """Goes from one tensor to the other, exactly the first at weight 0.

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
    """Counts a blend of two states, the plain sum included."""
    return Cost(params=1, elementwise_flops=4 * shape.total_tokens * width)
