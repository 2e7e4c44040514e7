"""Rotary position embedding, rotate-half layout, from absolute positions.

Letters: B batch, T position, H heads, K key width.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from twoaxis.ops.precision import outside_autocast, statistics_dtype

Rotation = tuple[Float[Tensor, "_ T 1 half"], Float[Tensor, "_ T 1 half"]]
"""Cosines and sines of the angles of each position, one per pair of channels."""


def rotation(positions: Int[Tensor, "_ T"], head_dim: int, theta: float, dtype: torch.dtype) -> Rotation:
    """The angles position * theta^(-2i/K) for i = 0..K/2-1, as cosines and sines in `dtype`.

    Source: RoFormer, arXiv:2104.09864, eq. 15; nothing is tabulated, so no position is too large.
    """
    exponent = torch.arange(0, head_dim, 2, device=positions.device, dtype=dtype) / head_dim
    angles = positions.to(dtype).unsqueeze(-1) * theta**-exponent
    return angles.cos().unsqueeze(2), angles.sin().unsqueeze(2)


@outside_autocast
def rotate(x: Float[Tensor, "B T H K"], turn: Rotation) -> Float[Tensor, "B T H K"]:
    """Rotates the channel pairs (i, i + K/2) of every head by the angle of its position."""
    cos, sin = turn
    first, second = x.to(statistics_dtype(x)).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
