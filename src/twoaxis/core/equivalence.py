"""The relation of a newly initialised model to the plain pre-norm model, which tests verify."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class InitEquivalence:
    """The relation at initialisation to the plain pre-norm model with the same shared parameters.

    Attributes:
        relation: `exact` (same logits bit for bit up to rounding), `up_to_norm` (the stream differs by a
            factor that the next norm removes, so logits agree as the norm's eps goes to 0), or `none`.
        reason: one sentence.
    """

    relation: Literal["exact", "up_to_norm", "none"]
    reason: str
