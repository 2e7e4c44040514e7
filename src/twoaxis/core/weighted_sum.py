"""A weighted sum of sources along depth, with its weights: what audits look at, and never a part of a training step.

Letters: B batch, T position, E width of the sum, S sources, P parts of the width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float
from torch import Tensor

Role = Literal["read", "mix"]


@dataclass(frozen=True, eq=False)
class WeightedSum:
    """One sum that a depth mixer has formed, with the tensor that it became.

    Equation: made = finish(sum_s w_s v_s), with one w_s for each token and part of the width

    Attributes:
        made: the very tensor that stands in what the mixer returned.
        result: what that is: `read`, `q`, `residual`, `stream 0`.
        names: of the sources, such as `embedding`, `sublayer 3` or `block 1`.
        sources: what is summed.
        weights: parts are equal slices of the width: the whole of it, the heads, or every feature.
        role: whether a sublayer or the head reads the sum, or parallel streams are mixed by it.
        parts: names of the parts, where they are told apart.
        finish: what turns the sum into `made`, such as a norm, a projection or the addition to a stream; None is nothing.
    """

    made: Tensor
    result: str
    names: tuple[str, ...]
    sources: tuple[Float[Tensor, "B T E"], ...]
    weights: Float[Tensor, "S B T P"]
    role: Role = "read"
    parts: tuple[str, ...] = ()
    finish: Callable[[Tensor], Tensor] | None = None

    def contribution(self, index: int) -> Float[Tensor, "B T E"]:
        """What one source adds to the sum."""
        source, weight = self.sources[index], self.weights[index]
        return (weight.unsqueeze(-1) * source.unflatten(-1, (weight.shape[-1], -1))).flatten(-2)

    def total(self) -> Float[Tensor, "B T E"]:
        """The sum of all contributions, before it is finished."""
        total = self.contribution(0)
        for index in range(1, len(self.sources)):
            total = total + self.contribution(index)
        return total

    def finished(self, total: Float[Tensor, "B T E"]) -> Tensor:
        """What a sum of contributions becomes."""
        return total if self.finish is None else self.finish(total)

    def without(self, index: int) -> Tensor:
        """What would have been made without one source, all other weights as they are."""
        removed = self.contribution(index)
        if self.finish is None:
            return (self.made - removed).to(self.made.dtype)
        total = self.total()
        # The change is added to what was made, so that a contribution of zero changes nothing at all.
        return (self.made + (self.finish(total - removed) - self.finish(total))).to(self.made.dtype)


def per_token(weights: Float[Tensor, "S *each"], like: Float[Tensor, "B T _"]) -> Float[Tensor, "S B T P"]:
    """Weights that are one number, one per feature, one per token, or one per token and part, in the last of these forms."""
    B, T = like.shape[:2]
    if weights.ndim == 1:
        return weights.view(-1, 1, 1, 1).expand(-1, B, T, 1)
    if weights.ndim == 2:
        return weights[:, None, None, :].expand(-1, B, T, -1)
    return weights.unsqueeze(-1) if weights.ndim == 3 else weights


def span_name(what: str, first: int, last: int) -> str:
    """The name of a source that holds what one or several of a kind have added.

    Example:
        >>> span_name("sublayer", 3, 3), span_name("block", 0, 2)
        ('sublayer 3', 'blocks 0-2')
    """
    return f"{what} {first}" if first == last else f"{what}s {first}-{last}"


def unit_name(unit: int, what: str = "block") -> str:
    """The name of the embedding, which is unit 0, or of what block (or sublayer) `unit - 1` has left.

    Example:
        >>> unit_name(0), unit_name(1)
        ('embedding', 'block 0')
    """
    return f"{what} {unit - 1}" if unit else "embedding"
