"""The inputs of a sublayer from the depth state, the heads that a depth mixer may mix, and weighted sums of sources.

Letters: B batch, T position, D width, H heads, G kv-heads, K key width, E width of a sum, S sources, P parts of the width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from jaxtyping import Float
from torch import Tensor


class QKV(NamedTuple):
    """Separate [B T D] inputs for the queries, keys and values of one sequence mixer."""

    q: Float[Tensor, "B T D"]
    k: Float[Tensor, "B T D"]
    v: Float[Tensor, "B T D"]


class Heads(NamedTuple):
    """Queries, keys and values of one sublayer, at the stage that `SublayerInfo.heads_at` names.

    Attributes:
        q: queries.
        k: keys.
        v: values.
        unrotated: of rotated heads, the keys before their rotation [B T G K], and the gain [K] or [G*K] of their norm if any.
        beside: one more key for each query, in the same softmax: its score [B T H], its value [B T H K], and a weight [1]
            of what it changes if any.
    """

    q: Float[Tensor, "B T H K"]
    k: Float[Tensor, "B T G K"]
    v: Float[Tensor, "B T G K"]
    unrotated: tuple[Tensor, ...] = ()
    beside: tuple[Tensor, ...] = ()


Views = Float[Tensor, "B T D"] | QKV


Role = Literal["read", "mix"]


@dataclass(frozen=True, eq=False)
class WeightedSum:
    """One sum of a depth mixer.

    Equation: made = finish(sum_s w_s v_s), with one w_s for each token and part of the width

    Attributes:
        made: the result, the same tensor as in the output of the mixer.
        result: the name of the result: `read`, `q`, `residual`, `stream 0`.
        names: of the sources, such as `embedding`, `sublayer 3` or `block 1`.
        sources: the summands.
        weights: parts are equal slices of the width: the whole width, the heads, or every feature.
        role: whether a sublayer or the head reads the sum, or it mixes parallel streams.
        parts: names of the parts, if distinguished.
        finish: from the sum to `made`, such as a norm, a projection or the addition to a stream; None is the identity.
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
        """The summand of one source."""
        source, weight = self.sources[index], self.weights[index]
        return (weight.unsqueeze(-1) * source.unflatten(-1, (weight.shape[-1], -1))).flatten(-2)

    def total(self) -> Float[Tensor, "B T E"]:
        """The sum of all contributions, before `finish`."""
        total = self.contribution(0)
        for index in range(1, len(self.sources)):
            total = total + self.contribution(index)
        return total

    def finished(self, total: Float[Tensor, "B T E"]) -> Tensor:
        """The result for a sum of contributions."""
        return total if self.finish is None else self.finish(total)

    def without(self, index: int) -> Tensor:
        """The result without one source, with all other weights unchanged."""
        removed = self.contribution(index)
        if self.finish is None:
            return (self.made - removed).to(self.made.dtype)
        total = self.total()
        # As a difference to `made`, so that a contribution of zero changes nothing.
        return (self.made + (self.finish(total - removed) - self.finish(total))).to(self.made.dtype)


def per_token(weights: Float[Tensor, "S *each"], like: Float[Tensor, "B T _"]) -> Float[Tensor, "S B T P"]:
    """Expands weights that are one number, one per feature, or one per token, to one per token and part."""
    B, T = like.shape[:2]
    if weights.ndim == 1:
        return weights.view(-1, 1, 1, 1).expand(-1, B, T, 1)
    if weights.ndim == 2:
        return weights[:, None, None, :].expand(-1, B, T, -1)
    return weights.unsqueeze(-1) if weights.ndim == 3 else weights


def span_name(what: str, first: int, last: int) -> str:
    """The name of a source with the output of one or several of a kind.

    Example:
        >>> span_name("sublayer", 3, 3), span_name("block", 0, 2)
        ('sublayer 3', 'blocks 0-2')
    """
    return f"{what} {first}" if first == last else f"{what}s {first}-{last}"


def unit_name(unit: int, what: str = "block") -> str:
    """The name of the embedding, which is unit 0, or of the output of block (or sublayer) `unit - 1`.

    Example:
        >>> unit_name(0), unit_name(1)
        ('embedding', 'block 0')
    """
    return f"{what} {unit - 1}" if unit else "embedding"
