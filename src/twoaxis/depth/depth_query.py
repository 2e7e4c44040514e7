"""The read of Attention Residuals at one place: a pseudo-query, and what it makes of the sources.

Letters: B batch, T position, D width, H heads, R key rank, S depth sources, W width of a key.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from twoaxis.core.parameters import Constant, DeclaredModule
from twoaxis.core.weighted_sum import WeightedSum, per_token
from twoaxis.ops.depth_read import Values, depth_read, depth_scores, depth_weights, softmax_mix
from twoaxis.ops.precision import Impl, outside_autocast
from twoaxis.ops.two_phase import EarlyRead


class Sources(NamedTuple):
    """The depth state: every source with the inverse rms of each of its keys, which all later reads share.

    Attributes:
        values: the sources.
        inverse_rms: of the keys.
        keys: the keys, or empty where a source is its own key.
        early: reads that phase 1 has begun for the sublayers to come.
    """

    values: tuple[Float[Tensor, "B T D"], ...]
    inverse_rms: tuple[Float[Tensor, "B T"], ...]
    keys: tuple[Float[Tensor, "B T R"], ...] = ()
    early: tuple[EarlyRead, ...] = ()


@dataclass(frozen=True)
class ReadForm:
    """How one place reads.

    Attributes:
        names: of its sources, oldest first.
        key_width: W.
        n_heads: H.
        impl: the engine.
        query: one for all tokens, or one for each.
        keys: the sources themselves behind a learned gain or without one, or keys that the sublayers emit.
        values: the sources as they are, or normalised.
        score_scale: factor on the scores.
        read_scale: factor on the mixture.
        prior: what is added to the scores of each source, if anything.
    """

    names: tuple[str, ...]
    key_width: int
    n_heads: int
    impl: Impl
    query: Literal["static", "token"] = "static"
    keys: Literal["gained", "plain", "emitted"] = "gained"
    values: Values = "raw"
    score_scale: float = 1.0
    read_scale: int = 1
    prior: tuple[float, ...] | None = None


class DepthQuery(DeclaredModule):
    """One read: a pseudo-query and, where sources are keys, their gain, of which only the product matters."""

    def __init__(self, form: ReadForm) -> None:
        super().__init__()
        self.form, W = form, form.key_width
        self.pseudo_query = self.parameter("pseudo_query", (W,), Constant(0.0), "query")
        self.key_gain = self.parameter("key_gain", (W,), Constant(1.0), "norm") if form.keys == "gained" else None
        if form.query == "token":
            self.query_map = self.parameter("query_map", (W, W), Constant(0.0), "matrix")

    def forward(self, sources: Sources) -> Float[Tensor, "B T D"]:
        """Returns the mixture of the sources."""
        form, query = self.form, self.query(sources)
        if form.keys == "emitted":
            return self.scaled(softmax_mix(sources.values, self._logits(sources, query), form.impl))
        given = sources.values, sources.inverse_rms, query, form.impl
        return self.scaled(depth_read(*given, n_heads=form.n_heads, values=form.values))

    def scaled(self, mixture: Tensor) -> Tensor:
        """The mixture times the number of its sources where their sum is asked for."""
        return mixture if self.form.read_scale == 1 else mixture * self.form.read_scale

    def sum(self, sources: Sources, made: Float[Tensor, "B T D"], result: str = "read") -> WeightedSum:
        """The mixture with its weights."""
        form, query, values = self.form, self.query(sources), sources.values
        if form.keys == "emitted":
            weights = torch.softmax(self._logits(sources, query), dim=0)
        else:
            weights = depth_weights(values, sources.inverse_rms, query, form.n_heads)
        if form.values == "normalised":
            values = tuple(v * r.unsqueeze(-1) for v, r in zip(values, sources.inverse_rms, strict=True))
        return WeightedSum(made, result, form.names, values, per_token(self.scaled(weights), made))

    def _logits(self, sources: Sources, query: Tensor) -> Float[Tensor, "S B T H"]:
        """Scores of emitted keys."""
        logits = depth_scores(sources.keys, sources.inverse_rms, query, self.form.n_heads)
        if self.form.prior is None:
            return logits
        return logits + torch.tensor(self.form.prior, dtype=logits.dtype, device=logits.device).view(-1, 1, 1, 1)

    def query(self, sources: Sources) -> Float[Tensor, "*each W"]:
        """The query with the key gain in it, in the precision of statistics."""
        newest = sources.inverse_rms[-1]
        query = self.pseudo_query.to(newest.dtype)
        if self.form.query == "token":
            key = (sources.keys or sources.values)[-1]
            query = query + linear(key * newest.unsqueeze(-1), self.query_map.to(newest.dtype))
        # The product in float32, so that two rounded factors do not become one badly rounded query.
        query = query if self.key_gain is None else query * self.key_gain
        return query if self.form.score_scale == 1.0 else query * self.form.score_scale


@outside_autocast
def linear(x: Tensor, weight: Tensor) -> Tensor:
    """A linear map in the precision of its arguments, whatever autocast says."""
    return F.linear(x, weight)
