"""The design of a mixer: its relation to the plain model at initialisation, how it forms weights, and where its sum goes."""

from dataclasses import asdict, dataclass
from typing import Any, Literal


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


LETTERS = (
    "h_l: state between blocks; x_g: stream before sublayer g; f_j: output of sublayer j; X_j: output of block j; D_j: what "
    "block j adds; S_j: one of n parallel streams; e: embedding; c_t: what a sublayer sees of token t, behind its norm."
)
"""The legend of the entries."""

Sharing = Literal["none", "model", "block", "sublayer"]
"""One set of parameters for the `model`, for each `block` that mixes, for each `sublayer`, or none."""

Weights = Literal["static", "input", "input and reader"]
"""The inputs of a weight: parameters only, the sources too, or the newest state too.

The factor of a norm of sources or of their sum is no weight.
"""

HeadMixing = Literal["none", "each", "groups", "across"]
"""The heads of attention that a depth mixer works on: none, each by itself, each kv-head with its queries, or one with values
of others."""


@dataclass(frozen=True)
class MixingDesign:
    """The design of one mixer, declared next to its mathematics and verified by checks where it can be measured.

    Attributes:
        query: the query of the sources, or "none".
        key: compared with the query, or the input of the weight.
        value: the summands.
        normaliser: the bound of the weights; begins with "norm" if only norms bound them, which a check cannot distinguish
            from weights.
        window: the sources that can be read; begins with "all" if their number grows with depth.
        sharing: of the parameters of weights and values.
        injection: the destination of the sum.
        weights: the inputs of the weights.
        position: whether earlier tokens enter the weights or the sum.
        literal: whether it is the depth read of arXiv:2603.16039, section 2.2, as far as the paper specifies it.
        heads: how it mixes the heads of attention. Ranks that divide the heads sum the gradients of what works on `each`
            by itself, or on `groups`, which they may not cut; `across` cannot be divided.

    Example:
        >>> from twoaxis.depth import ResidualConfig
        >>> ResidualConfig().design.window
        'own state'
    """

    query: str
    key: str
    value: str
    normaliser: str
    window: str
    sharing: Sharing
    injection: str
    weights: Weights = "static"
    position: bool = False
    literal: bool = False
    heads: HeadMixing = "none"

    @property
    def grows(self) -> bool:
        """Whether the number of sources grows with depth."""
        return self.window.startswith("all")

    def to_data(self) -> dict[str, Any]:
        """The design as JSON-ready data."""
        return asdict(self)


def free_taps(value: str, injection: str, window: str = "last k tokens", normaliser: str = "none") -> MixingDesign:
    """The design of a sum of the last tokens with free weights."""
    return MixingDesign("none", "none", value, normaliser, window, "sublayer", injection, position=True)
