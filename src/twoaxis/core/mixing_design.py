"""How a mixer forms its weights and where its sum goes: the columns by which methods on both axes are compared."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

LETTERS = (
    "h_l: state between blocks; x_g: stream before sublayer g; f_j: output of sublayer j; X_j: output of block j; D_j: what "
    "block j adds; S_j: one of n parallel streams; e: embedding; c_t: what a sublayer sees of token t, behind its norm."
)
"""Of the entries."""

Sharing = Literal["none", "model", "block", "sublayer"]
"""Whether there is one set of parameters for the `model`, for each `block` that mixes, for each `sublayer`, or none."""

Weights = Literal["static", "input", "input and reader"]
"""What a weight depends on apart from parameters: nothing, the source that it weighs and its rivals, or the newest state too.

A factor that a norm of sources or of their sum brings along is no weight.
"""


@dataclass(frozen=True)
class MixingDesign:
    """What one mixer is made of, as declared next to its mathematics; checks measure what can be measured.

    Attributes:
        query: what asks for sources; "none" where nothing does.
        key: what a query is compared with, or what a weight is made of.
        value: what is summed.
        normaliser: what bounds the weights; it begins with "norm" where nothing but norms does, of which a check cannot tell
            whether they are weights.
        window: which sources can be read; it begins with "all" where their number grows with depth without a bound.
        sharing: of the parameters that make weights and values.
        injection: where the sum goes.
        weights: what they depend on.
        position: whether tokens before this one enter the weights or the sum.
        literal: whether it is the depth read of arXiv:2603.16039, section 2.2, up to what the paper leaves open.

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

    @property
    def grows(self) -> bool:
        """Whether more depth means more sources."""
        return self.window.startswith("all")

    def to_data(self) -> dict[str, Any]:
        """Plain JSON-ready data."""
        return asdict(self)
