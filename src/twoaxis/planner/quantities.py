"""Bytes per number, and the parsers of sizes and times with a unit."""

import math
import re

from pydantic import Field

from twoaxis.core.config import Config
from twoaxis.core.errors import ConfigError, nearest


class Precision(Config):
    """Bytes per number.

    Activations and caches have 1, 2, 4 or 8 bytes. PyTorch computes in no dtype of one byte, so those are measured on a run in
    bfloat16 whose every bfloat16 number counts as one byte; statistics stay in float32.

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


BYTES = {
    "B": 1,
    **{f"{p}B": 1000**n for n, p in enumerate("kMGTP", 1)},
    **{f"{p}iB": 1024**n for n, p in enumerate("KMGTP", 1)},
}
"""Units of memory: GB is 1000^3 bytes, GiB 1024^3."""

SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
"""Units of time."""


def parse_bytes(text: str, what: str) -> float:
    """Parses a size such as 70GB or 64GiB to bytes.

    Raises:
        ConfigError: no number, no unit, or one of something else.

    Example:
        >>> parse_bytes("64 GiB", "budget") == 64 * 2**30
        True
    """
    return _parsed(text, what, BYTES, "70GB or 64GiB")


def parse_seconds(text: str, what: str) -> float:
    """Parses a time such as 20ms to seconds.

    Raises:
        ConfigError: no number, no unit, or one of something else.

    Example:
        >>> parse_seconds("20ms", "budget")
        0.02
    """
    return _parsed(text, what, SECONDS, "20ms or 0.02s")


def _parsed(text: str, what: str, units: dict[str, float], such_as: str) -> float:
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+)\s*([A-Za-z]*)\s*", text)
    if found is None:
        raise ConfigError(f"{what}={text!r}: must be one number and its unit, not negative; write for example {such_as}")
    number, unit = float(found[1]), found[2]
    if not unit:
        raise ConfigError(f"{what}={text!r}: has no unit; write for example {such_as}")
    if unit not in units:
        other = "a unit of time" if unit in SECONDS else "a unit of memory" if unit in BYTES else "not a known unit"
        alike = [known for known in units if known.lower() == unit.lower()]
        remedy = f"did you mean {alike[0]!r}?" if alike else f"{nearest(unit, units)}, for example {such_as}"
        raise ConfigError(f"{what}={text!r}: {unit!r} is {other}; {remedy}")
    value = number * units[unit]
    if not 0 < value < math.inf:
        raise ConfigError(f"{what}={text!r}: must be above zero and finite; write for example {such_as}")
    return value
