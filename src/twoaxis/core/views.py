"""What a sublayer reads from the depth state: one tensor, or separate inputs for queries, keys and values."""

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor


class QKV(NamedTuple):
    """Separate [B T D] inputs for the queries, keys and values of one sequence mixer."""

    q: Float[Tensor, "B T D"]
    k: Float[Tensor, "B T D"]
    v: Float[Tensor, "B T D"]


Views = Float[Tensor, "B T D"] | QKV
