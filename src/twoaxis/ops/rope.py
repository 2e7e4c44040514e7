"""Rotary position embedding, rotate-half layout, from absolute positions.

Letters: B batch, T position, H heads, K key width.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from twoaxis.core.cost import Shape
from twoaxis.core.layout import TokenLayout
from twoaxis.ops.precision import outside_autocast, statistics_dtype

Rotation = tuple[Float[Tensor, "_ T 1 K"], Float[Tensor, "_ T 1 K"]]
"""The cosine that each channel is multiplied with, and the signed sine for the other channel of its pair."""


def rotation(positions: Int[Tensor, "_ T"], head_dim: int, theta: float, dtype: torch.dtype) -> Rotation:
    """The angles position * theta^(-2i/K) for i = 0..K/2-1, as cosines and sines in `dtype`.

    Source: RoFormer, arXiv:2104.09864, eq. 15; nothing is tabulated, so no position is too large.
    """
    exponent = torch.arange(0, head_dim, 2, device=positions.device, dtype=dtype) / head_dim
    angles = positions.to(dtype).unsqueeze(-1) * theta**-exponent
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1).unsqueeze(2), torch.cat((-sin, sin), dim=-1).unsqueeze(2)


class RotationTable(NamedTuple):
    """What `layout_rotation` makes once for all layers that ask for the same, and autograd keeps: a cosine and a sine."""

    width: int
    theta: float

    def saved_bytes(self, shape: Shape) -> int:
        """Bytes of the table, where all rows have the same positions.

        Example:
            >>> RotationTable(width=64, theta=1e4).saved_bytes(Shape(batch=8, tokens=10, element_bytes=2))
            5120
        """
        return 2 * shape.tokens * self.width * shape.statistics_bytes


def layout_rotation(layout: TokenLayout, head_dim: int, theta: float, dtype: torch.dtype) -> Rotation:
    """The rotation of the positions of a layout, computed once for all that ask for the same."""
    key = ("rotation", head_dim, theta, dtype)
    return layout.shared(key, lambda: rotation(layout.positions, head_dim, theta, dtype))


@outside_autocast
def rotate(x: Float[Tensor, "B T H K"], turn: Rotation) -> Float[Tensor, "B T H K"]:
    """Rotates the channel pairs (i, i + K/2) of every head by the angle of its position."""
    cos, sin = turn
    wide = x.to(statistics_dtype(x))
    return torch.addcmul(wide * cos, wide.roll(x.shape[-1] // 2, dims=-1), sin).to(x.dtype)
