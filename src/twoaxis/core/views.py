"""The inputs of a sublayer from the depth state, and the heads of attention that a depth mixer may mix.

Letters: B batch, T position, D width, H heads, G kv-heads, K key width.
"""

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor


class QKV(NamedTuple):
    """Separate [B T D] inputs for the queries, keys and values of one sequence mixer."""

    q: Float[Tensor, "B T D"]
    k: Float[Tensor, "B T D"]
    v: Float[Tensor, "B T D"]


class Heads(NamedTuple):
    """Projected queries, keys and values, before any rotation or norm of heads."""

    q: Float[Tensor, "B T H K"]
    k: Float[Tensor, "B T G K"]
    v: Float[Tensor, "B T G K"]


Views = Float[Tensor, "B T D"] | QKV
