"""Rotary position embedding, rotate-half layout, from absolute positions; and frequencies scaled for longer contexts.

Letters: B batch, T position, H heads, K key width or rotated channels, one frequency f for each pair of them, W tokens of a
sequence in pretraining.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import Annotated, Any, Literal, NamedTuple, Self

import torch
from jaxtyping import Float, Int
from pydantic import BeforeValidator, Field, SerializeAsAny, model_validator
from torch import Tensor

from twoaxis.core.config import Config
from twoaxis.core.cost import Shape
from twoaxis.core.errors import ConfigError, problem
from twoaxis.core.layout import TokenLayout
from twoaxis.core.registry import Row, Table
from twoaxis.ops.cpu import cpu_only
from twoaxis.ops.kernels import operator
from twoaxis.ops.precision import IN_PLAIN_FORMS, outside_autocast, refuse_second_gradients, statistics_dtype


class RopeScaling(Config, ABC):
    """A scaling of frequencies: f (s + (1 - s) / factor), where a share s between 0 and 1 is unchanged."""

    factor: float = Field(ge=1)

    @abstractmethod
    def left(self, frequencies: Float[Tensor, " pairs"], theta: float) -> Float[Tensor, " pairs"]:
        """Returns the share s of each frequency that is unchanged."""

    @property
    def magnitude(self) -> float:
        """The factor of cosines and sines; scores are multiplied by its square."""
        return 1.0

    def scale(self, frequencies: Float[Tensor, " pairs"], theta: float) -> Float[Tensor, " pairs"]:
        """Returns the scaled frequencies."""
        left = self.left(frequencies, theta)
        return frequencies * (left + (1 - left) / self.factor)


class LinearScaling(RopeScaling):
    """Divides all frequencies, as if positions were that much closer together.

    Equation: f' = f / factor
    Source:   Extending Context Window of Large Language Models via Position Interpolation, arXiv:2306.15595, eq. 4

    Example:
        >>> LinearScaling(factor=4).scale(torch.tensor([1.0, 0.1]), theta=100).tolist()
        [0.25, 0.02500000037252903]
    """

    kind: Literal["linear"] = "linear"

    def left(self, frequencies: Float[Tensor, " pairs"], theta: float) -> Float[Tensor, " pairs"]:
        """Returns zeros."""
        return torch.zeros_like(frequencies)


class Llama3Scaling(RopeScaling):
    """Divides frequencies that turn less than `low_freq_factor` times in a pretraining sequence, as Llama 3.1 and later do.

    Equation: f' = f (s + (1 - s) / factor),  s = clamp((W f / 2 pi - low) / (high - low), 0, 1)
    Source:   transformers, `rope_type` llama3, after the code released with Llama 3.1
    Args:
        factor: of the slow ones.
        low_freq_factor: turns in W tokens below which a frequency is divided by the factor; 1 in Llama 3.1.
        high_freq_factor: turns in W tokens above which it is unchanged; 4 there.
        original_max_seq_len: W; 8192 there.

    Raises:
        ConfigError: bounds in the wrong order.
    """

    kind: Literal["llama3"] = "llama3"
    low_freq_factor: float = Field(gt=0)
    high_freq_factor: float = Field(gt=0)
    original_max_seq_len: int = Field(ge=1)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.high_freq_factor <= self.low_freq_factor:
            allowed = f"> low_freq_factor={self.low_freq_factor:g}"
            raise ConfigError(problem("high_freq_factor", self.high_freq_factor, allowed, "exchange them"))
        return self

    def left(self, frequencies: Float[Tensor, " pairs"], theta: float) -> Float[Tensor, " pairs"]:
        """Returns a share that rises with the turns in W tokens."""
        turns = self.original_max_seq_len * frequencies / (2 * math.pi)
        return ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)


class YarnScaling(RopeScaling):
    """Divides slow frequencies by a ramp over pairs of channels, and sharpens attention (YaRN).

    Equation: f'_i = f_i (s_i + (1 - s_i) / factor),  s_i = 1 - clamp((i - a) / (b - a), 0, 1),
              a, b = K ln(W / (2 pi turns)) / (2 ln theta) for beta_fast and beta_slow turns, within [0, K - 1]
    Source:   YaRN: Efficient Context Window Extension of Large Language Models, arXiv:2309.00071, eq. 17 to 22
    Deviates: the ramp runs over the number of a pair, as in the authors' code, where the paper's runs over turns
    Args:
        factor: of the slow ones.
        original_max_seq_len: W.
        beta_fast: turns in W tokens above which a frequency is unchanged.
        beta_slow: turns below which it is divided by the factor.
        attention_factor: factor of queries and keys; None means 0.1 ln(factor) + 1.
        bounds: `whole` rounds a down and b up to pairs, as in the authors' code; `exact` does not, as in gpt-oss.

    Raises:
        ConfigError: bounds in the wrong order.

    Example:
        >>> round(YarnScaling(factor=4, original_max_seq_len=4096).magnitude, 4)
        1.1386
    """

    kind: Literal["yarn"] = "yarn"
    original_max_seq_len: int = Field(ge=1)
    beta_fast: float = Field(default=32.0, gt=0)
    beta_slow: float = Field(default=1.0, gt=0)
    attention_factor: float | None = Field(default=None, gt=0)
    bounds: Literal["whole", "exact"] = "whole"

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.beta_fast <= self.beta_slow:
            raise ConfigError(problem("beta_fast", self.beta_fast, f"> beta_slow={self.beta_slow:g}", "exchange them"))
        return self

    @property
    def magnitude(self) -> float:
        """The attention factor."""
        return 0.1 * math.log(self.factor) + 1 if self.attention_factor is None else self.attention_factor

    def left(self, frequencies: Float[Tensor, " pairs"], theta: float) -> Float[Tensor, " pairs"]:
        """Returns a share that falls with the index of the pair."""
        pairs = frequencies.shape[0]
        first, last = (self._pair(turns, 2 * pairs, theta) for turns in (self.beta_fast, self.beta_slow))
        if self.bounds == "whole":
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * pairs - 1)
        number = torch.arange(pairs, device=frequencies.device, dtype=frequencies.dtype)
        # The bounds may be equal; the ramp is then a step.
        return 1 - ((number - first) / max(last - first, 1e-3)).clamp(0, 1)

    def _pair(self, turns: float, channels: int, theta: float) -> float:
        """Returns the index, not rounded, of the pair that makes so many turns in W tokens."""
        return channels * math.log(self.original_max_seq_len / (2 * math.pi * turns)) / (2 * math.log(theta))


ROPE_SCALING: Table[RopeScaling] = Table(
    "rope scaling",
    RopeScaling,
    "twoaxis.rope_scaling",
    [
        Row(LinearScaling, "divides all frequencies", {"default": {"factor": 2.0}}),
        Row(
            Llama3Scaling,
            "divides slow frequencies, as in Llama 3.1",
            {"default": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 8192}},
        ),
        Row(
            YarnScaling,
            "divides slow frequencies and sharpens attention",
            {
                "default": {"factor": 4.0, "original_max_seq_len": 4096},
                "exact": {"factor": 4.0, "original_max_seq_len": 4096, "bounds": "exact", "attention_factor": 1.0},
            },
        ),
    ],
)


def _parse(data: Any) -> RopeScaling | None:
    return None if data is None else ROPE_SCALING.parse(data)


Scaling = Annotated[SerializeAsAny[RopeScaling] | None, BeforeValidator(_parse)]
"""The type of a configuration's field that holds a scaling or none."""


Rotation = tuple[Float[Tensor, "_ T 1 K"], Float[Tensor, "_ T 1 K"]]
"""The cosine for each channel, and the signed sine for the other channel of its pair."""


class RotationTable(NamedTuple):
    """The cosines and sines that `layout_rotation` computes once for all layers with the same table, and autograd saves.

    Attributes:
        width: channels that are rotated.
        theta: base of the angles.
        scaling: of the frequencies; None leaves them unchanged.
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
    opaque = torch.compiler.is_compiling() and not torch.compiler.is_exporting() and positions.device.type == "cpu"
    cos, sin = torch.ops.twoaxis.rotation(positions, frequencies) if opaque else _rotation(positions, frequencies)
    return (cos, sin) if table.scaling is None else (cos * table.scaling.magnitude, sin * table.scaling.magnitude)


def _empty_rotation(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    shape = *positions.shape, 1, 2 * frequencies.shape[0]
    return frequencies.new_empty(shape), frequencies.new_empty(shape)


# Opaque to a compiler, which would else compute powers, cosines and sines again for each head of each layer.
@operator("rotation(Tensor positions, Tensor frequencies) -> (Tensor, Tensor)", _empty_rotation, devices=("CPU",))
def _rotation(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    angles = positions.to(frequencies.dtype).unsqueeze(-1) * frequencies
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1).unsqueeze(2), torch.cat((-sin, sin), dim=-1).unsqueeze(2)


def layout_rotation(layout: TokenLayout, table: RotationTable, dtype: torch.dtype) -> Rotation:
    """Returns the rotation of the positions of a layout, computed once for all layers with the same table."""
    return layout.shared(shared_key(table, dtype), lambda: rotation(layout.positions, table, dtype))


def shared_key(table: RotationTable, dtype: torch.dtype) -> Hashable:
    """Returns the key of the rotation among the shared values of a layout."""
    # A compiled graph cannot hash a configuration, but the values of its fields.
    scaling = None if table.scaling is None else tuple(table.scaling.__dict__.values())
    return "rotation", table.width, table.theta, scaling, dtype


@outside_autocast
def rotate(x: Float[Tensor, "B T H K"], turn: Rotation) -> Float[Tensor, "B T H K"]:
    """Rotates the channel pairs (i, i + K/2) of every head by the angle of its position; on a CPU in C, in float32."""
    cos, sin = turn
    if cpu_only.serves_rotation(x, cos, sin):
        return _Rotate.apply(x, cos, sin)
    wide = x.to(statistics_dtype(x))
    first, second = wide.tensor_split(2, dim=-1)
    # The same as `roll`, whose gradient a compiler computes channel by channel.
    return torch.addcmul(wide * cos, torch.cat((second, first), dim=-1), sin).to(x.dtype)


class _Rotate(torch.autograd.Function):
    """In C. Saves the cosines and sines alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return cpu_only.rotate(x, cos, sin, backward=False)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        refuse_second_gradients("rotate", IN_PLAIN_FORMS)
        return cpu_only.rotate(grad_outputs[0], *ctx.saved_tensors, backward=True), None, None
