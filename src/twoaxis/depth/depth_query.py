"""Reads of sources by a pseudo-query: a softmax over depth, as a mixture or added to a stream.

Letters: B batch, T position, D width, H heads, R key rank, S depth sources, W width of a key.
"""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from twoaxis.core.cost import Cost
from twoaxis.core.parameters import Constant, DeclaredModule
from twoaxis.core.views import WeightedSum, per_token
from twoaxis.depth.base import Stream
from twoaxis.ops.depth_read import Values, depth_scores, depth_weights, passing_factor, passing_read, softmax_mix, source_factor
from twoaxis.ops.precision import Impl, outside_autocast, statistics_dtype
from twoaxis.ops.two_phase import EarlyRead


class Sources(NamedTuple):
    """The depth state: every source with the inverse rms of each of its keys, which all later reads share.

    Attributes:
        values: the sources.
        inverse_rms: of the keys.
        keys: the keys, or empty where a source is its own key.
        early: reads of phase 1 for later sublayers of the block.
    """

    values: tuple[Stream, ...]
    inverse_rms: tuple[Float[Tensor, "B T"], ...]
    keys: tuple[Float[Tensor, "B T R"], ...] = ()
    early: tuple[EarlyRead, ...] = ()

    def with_output(self, update: Float[Tensor, "B T W"], opens: bool, count: int, eps: float, impl: Impl) -> "Sources":
        """Returns the sources with one more output, which ends with the emitted key if there is one.

        Args:
            update: the output.
            opens: whether it is a source of its own; else it is added to the newest, whose key is the mean of all keys in it.
            count: outputs in the newest source afterwards.
            eps: of the rms.
            impl: `fused` or `reference`.
        """
        values, factors, keys, early = self
        # Under autocast the update may be narrower than the stream that it joins.
        update = update.to(values[0].dtype)
        emitted = update[..., values[0].shape[-1] :]
        if keys:
            update = update[..., : values[0].shape[-1]].contiguous()
        if not opens:
            update = values[-1] + update
            emitted = keys[-1] + (emitted - keys[-1]) / count if keys else emitted
            values, factors = values[:-1], factors[:-1]
        factor, key = passing_factor(emitted.contiguous() if keys else update, eps, impl)
        if keys:
            return Sources((*values, update), (*factors, factor), (*(keys if opens else keys[:-1]), key), early)
        return Sources((*values, key), (*factors, factor), (), early)


@dataclass(frozen=True)
class ReadForm:
    """The form of one read.

    Attributes:
        names: of its sources, oldest first.
        key_width: W.
        n_heads: H.
        impl: the engine.
        query: one for all tokens, or one for each.
        keys: the sources themselves with a learned gain or without one, or keys that the sublayers emit.
        values: the sources as they are, or normalised.
        score_scale: factor on the scores.
        read_scale: factor on the mixture.
        prior: added to the scores of each source; None adds nothing.
    """

    names: tuple[str, ...] = field(compare=False)
    key_width: int
    n_heads: int
    impl: Impl
    query: Literal["static", "token"] = "static"
    keys: Literal["gained", "plain", "emitted"] = "gained"
    values: Values = "raw"
    score_scale: float = 1.0
    read_scale: int = 1
    prior: tuple[float, ...] | None = None

    @property
    def params(self) -> int:
        """Parameters of the query, of the gain and of the map of tokens, where they exist."""
        W = self.key_width
        return W * (1 + (self.keys == "gained")) + (W * W if self.query == "token" else 0)

    def cost(self, d_model: int, tokens: int) -> Cost:
        """Counts one read of all sources at once; one source has no score."""
        n, D, H, W = len(self.names), d_model, self.n_heads, self.key_width
        if n == 1:
            return Cost()
        tokenwise = self.query == "token"
        # The factors of normalised values are one more product per weight.
        per_source = 2 * D + 2 * W + (5 if self.values == "raw" else 6) * H
        return Cost(
            params=self.params,
            matmul_flops=2 * tokens * W * W * tokenwise,
            elementwise_flops=tokens * (n * per_source + W * tokenwise + D * (self.read_scale > 1)),
        )

    def two_phase_cost(self, d_model: int, tokens: int, early: int, queries: int) -> Cost:
        """Counts phase 1 over the first `early` sources for some queries, and the merging of the later sources.

        Args:
            d_model: D.
            tokens: of the whole batch.
            early: sources that phase 1 reads.
            queries: of phase 1 at this place; 0 where no block opens.
        """
        D, H, late, reads = d_model, self.n_heads, len(self.names) - early, len(self.names) > 1
        per_query = 4 * D + 5 * H
        merging = (late * (4 * D + 5 * H) + 2 * D) * (reads and late > 0) + D * (reads and self.read_scale > 1)
        return Cost(
            params=reads * self.params,
            elementwise_flops=tokens * (early * queries * per_query + merging),
        )


class DepthQuery(DeclaredModule):
    """One read: a pseudo-query and, where sources are keys, their gain; only the product of both matters."""

    def __init__(self, form: ReadForm) -> None:
        super().__init__()
        self.form, W = form, form.key_width
        # The rank of emitted keys is that of every width.
        grows, both = ("neither", "neither") if form.keys == "emitted" else ("inputs", "both")
        self.pseudo_query = self.parameter("pseudo_query", (W,), Constant(0.0), "query", grows=grows)
        self.key_gain = self.parameter("key_gain", (W,), Constant(1.0), "norm") if form.keys == "gained" else None
        if form.query == "token":
            self.query_map = self.parameter("query_map", (W, W), Constant(0.0), "matrix", grows=both)

    def forward(self, sources: Sources) -> tuple[Stream, Sources]:
        """Returns the mixture of the sources, and these as the next reader should take them; see `passing_read`."""
        form, query = self.form, self.query(sources)
        if form.keys == "emitted":
            return self.scaled(softmax_mix(sources.values, self._logits(sources, query))), sources
        given = sources.values, sources.inverse_rms, query, form.impl
        read = passing_read(*given, n_heads=form.n_heads, values=form.values)
        return self.scaled(read.mixed), sources._replace(values=read.sources)

    def scaled(self, mixture: Tensor) -> Tensor:
        """Returns the mixture times the number of its sources where their sum is asked for."""
        return mixture if self.form.read_scale == 1 else mixture * self.form.read_scale

    def sum(self, sources: Sources, made: Stream, result: str = "read") -> WeightedSum:
        """Returns the mixture with its weights."""
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
        """Returns the query with the key gain in it, in the precision of statistics."""
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
    """Applies a linear map in the precision of its arguments, also under autocast."""
    return F.linear(x, weight)


class AddedRead(DeclaredModule):
    """A read that is added to a stream: a query and a gain where there is a choice, a null source and a factor if asked for.

    Args:
        names: of the sources, oldest first, a null source before them.
        d_model: D.
        eps: of the norm of a null source.
        null: whether there is a learned source that every token shares.
        gated: whether a learned factor scales the mixture.
        impl: `fused` or `reference`.
    """

    def __init__(self, names: tuple[str, ...], d_model: int, eps: float, null: bool, gated: bool, impl: Impl) -> None:
        super().__init__()
        self.names, self.eps, self.chooses = names, eps, len(names) > 1
        self.impl: Impl = impl
        if self.chooses:
            self.pseudo_query = self.parameter("pseudo_query", (d_model,), Constant(0.0), "query")
            self.key_gain = self.parameter("key_gain", (d_model,), Constant(1.0), "norm")
        self.null = self.parameter("null", (d_model,), Constant(0.0), "query", grows="outputs") if null else None
        self.alpha = self.parameter("alpha", (1,), Constant(0.0), "gate") if gated else None

    def forward(self, stream: Stream, sources: Sources) -> tuple[Stream, Sources]:
        """Returns the stream plus the mixture, and the sources as the next reader should take them; see `passing_read`."""
        values, factors = self._with_null(stream, sources)
        if self.chooses:
            read = passing_read(values, factors, self._query(factors), self.impl, stream=stream, scale=self.alpha)
            return read.mixed, sources._replace(values=read.sources[len(values) - len(sources.values) :])
        if self.alpha is None:
            return stream + values[0], sources
        return torch.addcmul(stream, self.alpha.to(stream.dtype), values[0]), sources

    def sum(self, stream: Stream, sources: Sources, made: Stream, result: str) -> WeightedSum:
        """Returns the mixture with its weights, which is added to the stream."""
        values, factors = self._with_null(stream, sources)
        if self.chooses:
            weights = depth_weights(values, factors, self._query(factors))
        else:
            weights = torch.ones(1, dtype=statistics_dtype(made), device=made.device)
        weights = weights if self.alpha is None else weights * self.alpha
        return WeightedSum(made, result, self.names, values, per_token(weights, made), finish=lambda mixed: stream + mixed)

    def _with_null(self, stream: Stream, sources: Sources) -> tuple[tuple[Stream, ...], tuple[Float[Tensor, "B T"], ...]]:
        """The sources and their factors, a null source before them."""
        values, factors = sources.values, sources.inverse_rms
        if self.null is None:
            return values, factors
        null = self.null.to(stream.dtype).view(1, 1, -1)
        if self.chooses:
            factors = (source_factor(null, self.eps, self.impl).expand(stream.shape[:-1]), *factors)
        return (null.expand_as(stream), *values), factors

    def _query(self, factors: tuple[Tensor, ...]) -> Float[Tensor, " D"]:
        # The product in float32, so that two rounded factors do not become one badly rounded query.
        return self.pseudo_query.to(factors[0].dtype) * self.key_gain
