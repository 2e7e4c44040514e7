"""Bytes of one number of each sort, in training and in generation."""

from pydantic import Field

from twoaxis.core.config import Config


class Precision(Config):
    """The bytes of one number.

    The defaults are mixed precision as most trainers run it: weights and activations in bfloat16, gradients, master weights
    and both moments of Adam in float32.

    Args:
        weights: of a parameter in the forward pass.
        activations: of an activation, and so of the depth state.
        gradients: of a gradient.
        optimizer: all that the optimizer keeps per parameter.
        cache: of a key or a value in generation.
    """

    weights: int = Field(default=2, ge=1, le=8)
    activations: int = Field(default=2, ge=1, le=8)
    gradients: int = Field(default=4, ge=1, le=8)
    optimizer: int = Field(default=12, ge=0, le=64)
    cache: int = Field(default=2, ge=1, le=8)
