"""The rank-one delta write: replace the component of a state along a direction.

Letters: D width.
"""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from twoaxis.ops.precision import outside_autocast, statistics_dtype

UpdateRule = Literal["delta", "write_only"]


@outside_autocast
def delta_write(
    x: Float[Tensor, "*n D"],
    direction: Float[Tensor, "*n D"],
    target: Float[Tensor, "*n 1"],
    beta: Float[Tensor, "*n 1"],
    eps: float,
    rule: UpdateRule = "delta",
) -> Float[Tensor, "*n D"]:
    """Moves the component of x along a direction towards a target; `write_only` adds without erasing.

    Equation: k = u / sqrt(|u|^2 + eps^2),  x' = x + beta * k * (v - k^T x)     (write_only: drop k^T x)
    Source:   Deep Delta Learning, arXiv:2601.00417v1, eq. 2.5 with d_v = 1
    Deviates: k is never formed: x' = x + a*u with a = beta * r * (v - r * u^T x), r = 1/sqrt(|u|^2 + eps^2)
    Cost:     flops 6*D per row; saves x, u and a few numbers per row
    """
    dtype = statistics_dtype(x)
    u, wide = direction.to(dtype), x.to(dtype)
    factor = torch.rsqrt((u * u).sum(-1, keepdim=True) + eps * eps)
    error = target if rule == "write_only" else target - factor * (u * wide).sum(-1, keepdim=True)
    return torch.addcmul(wide, beta * error * factor, u).to(x.dtype)
