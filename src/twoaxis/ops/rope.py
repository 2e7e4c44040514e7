"""Rotary position embedding, rotate-half layout, from absolute positions.

Letters: B batch, T position, H heads, K key width.
"""

from collections.abc import Hashable
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from twoaxis.core.cost import Shape
from twoaxis.core.layout import TokenLayout
from twoaxis.ops.precision import outside_autocast, statistics_dtype
from twoaxis.ops.rope_scaling import RopeScaling

Rotation = tuple[Float[Tensor, "_ T 1 K"], Float[Tensor, "_ T 1 K"]]
"""The cosine that each channel is multiplied with, and the signed sine for the other channel of its pair."""


class RotationTable(NamedTuple):
    """What `layout_rotation` makes once for all layers that ask for the same, and autograd keeps: a cosine and a sine.

    Attributes:
        width: channels that are rotated.
        theta: base of the angles.
        scaling: what becomes of frequencies; None leaves them.
    """

    width: int
    theta: float
    scaling: RopeScaling | None = None

    def saved_bytes(self, shape: Shape) -> int:
        """Bytes of the table, where all rows have the same positions.

        Example:
            >>> RotationTable(width=64, theta=1e4).saved_bytes(Shape(batch=8, tokens=10, element_bytes=2))
            5120
        """
        return 2 * shape.tokens * self.width * shape.statistics_bytes


def rotation(positions: Int[Tensor, "_ T"], table: RotationTable, dtype: torch.dtype) -> Rotation:
    """The angles position * theta^(-2i/K) for i = 0..K/2-1, as cosines and sines in `dtype`; a scaling changes the factor.

    Source: RoFormer, arXiv:2104.09864, eq. 15; nothing is tabulated, so no position is too large.
    """
    exponent = torch.arange(0, table.width, 2, device=positions.device, dtype=dtype) / table.width
    frequencies = table.theta**-exponent
    if table.scaling is not None:
        frequencies = table.scaling.scale(frequencies, table.theta)
    angles = positions.to(dtype).unsqueeze(-1) * frequencies
    cos, sin = angles.cos(), angles.sin()
    if table.scaling is not None:
        cos, sin = cos * table.scaling.magnitude, sin * table.scaling.magnitude
    return torch.cat((cos, cos), dim=-1).unsqueeze(2), torch.cat((-sin, sin), dim=-1).unsqueeze(2)


def layout_rotation(layout: TokenLayout, table: RotationTable, dtype: torch.dtype) -> Rotation:
    """The rotation of the positions of a layout, computed once for all that ask for the same."""
    return layout.shared(shared_key(table, dtype), lambda: rotation(layout.positions, table, dtype))


def shared_key(table: RotationTable, dtype: torch.dtype) -> Hashable:
    """What the rotation is called among what a layout shares."""
    # A compiled graph cannot hash a configuration, but the values of its fields.
    scaling = None if table.scaling is None else tuple(table.scaling.__dict__.values())
    return "rotation", table.width, table.theta, scaling, dtype


@outside_autocast
def rotate(x: Float[Tensor, "B T H K"], turn: Rotation) -> Float[Tensor, "B T H K"]:
    """Rotates the channel pairs (i, i + K/2) of every head by the angle of its position."""
    cos, sin = turn
    wide = x.to(statistics_dtype(x))
    return torch.addcmul(wide * cos, wide.roll(x.shape[-1] // 2, dims=-1), sin).to(x.dtype)
