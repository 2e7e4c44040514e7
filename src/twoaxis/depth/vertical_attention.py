"""Vertical Attention: each layer reads a learned convex combination of normalised earlier outputs. A reconstruction.

Letters: B batch, T position, D width, n sources of one read.
"""

from functools import partial
from typing import Any, Literal, NamedTuple, Self

import torch
from jaxtyping import Float
from pydantic import model_validator
from torch import Tensor

from twoaxis.core.cost import Cost, Shape
from twoaxis.core.design import InitEquivalence, MixingDesign
from twoaxis.core.errors import ConfigError, problem
from twoaxis.core.parameters import Constant
from twoaxis.core.position import LayerStack, SublayerPosition
from twoaxis.core.views import Views, unit_name
from twoaxis.depth.base import DepthConfig, DepthEnds, DepthMixer, Explanation, Layout, Read, Stream, Write
from twoaxis.depth.history import Combination, Granularity, n_units, unit_of
from twoaxis.ops.depth_read import source_factor
from twoaxis.ops.norm import layer_norm, rms_norm
from twoaxis.ops.precision import Impl, outside_autocast, statistics_dtype

NormKind = Literal["rms", "layer", "l2"]


class VerticalAttentionConfig(DepthConfig):
    """Replaces the input of each layer by a softmax-weighted sum of normalised earlier outputs: a reconstruction.

    Equation: M_l = sum_{i<l} softmax(w_l)_i N(H_i),  U_l = M_l (skip: x_{l-1} + g M_l, x_l = U_l + D_l, x_0 = H_0)
              D_l = sum of the updates of layer l; each sublayer reads U_l plus the updates before it;  H_0 = embeddings
              H_l = D_l (delta) | U_l + D_l (output);  N(h) = h / rms(h);  the model returns H_L, x_L or one more such read
    Source:   a reconstruction from the abstract and the public reviews of OpenReview A6uabXKiXc; neither its text nor code is
              public. The reviews support: one scalar per pair of layers, independent of the input, under a softmax, as in
              arXiv:2311.02265, with a norm of the activations. Every other option below is our choice, and no parity is claimed
    Deviates: unknown: every option but the kind of the weights is a guess, as Source says. A read of one source has no logit,
              since it would be dead
    Shapes:   state (n times [B T D], n times [B T] for norm `weights`, and the stream or the sum of updates); statistics,
              softmax and sums in float32, rounded once
    Init:     NONE: a convex sum of normalised outputs; EXACT with skip `gated`, g = 0
    Cost:     params n per read of n > 1 sources, 1 more with skip `gated`; flops 2*n*D per token and read, and the norms; state
              at most (L + 3)*D numbers per token
    Published: lower loss than a plain decoder at 50M-300M parameters and 20B tokens according to its abstract; according to
              a review a fixed pattern of skips beats it in 2 of 3 runs. No number can be attached to these options

    Args:
        source: a `delta` is the sum of updates of a layer, an `output` includes the layer's input.
        skip: `none`; or the ordinary residual stream, with the mixture `added` to it or `gated` by a learned scalar g.
        norm: applied to the `sources`, the `weights` (by the rms of their source, then again to sum 1), the `sum`, or
            `none`.
        norm_kind: `rms`, `layer` (LayerNorm without gain or bias) or `l2` (unit length); the weights have one kind only.
        granularity: a layer is a `block`, or a `sublayer`.
        embedding: a `source` of every layer, or only the `first_input`.
        head: the model returns the `last` output, or one more `mixture`.
        newest_logit: start of the logit of the newest source; the others start at 0.
        impl: `fused` or `reference`.

    Raises:
        ConfigError: a norm_kind for a norm that has none.

    Example:
        >>> VerticalAttentionConfig(skip="gated").init_equivalence.relation
        'exact'
    """

    kind: Literal["vertical_attention"] = "vertical_attention"
    source: Literal["delta", "output"] = "delta"
    skip: Literal["none", "added", "gated"] = "none"
    norm: Literal["sources", "weights", "sum", "none"] = "sources"
    norm_kind: NormKind = "rms"
    granularity: Granularity = "block"
    embedding: Literal["source", "first_input"] = "source"
    head: Literal["last", "mixture"] = "last"
    newest_logit: float = 0.0
    impl: Impl = "fused"

    @property
    def design(self) -> MixingDesign:
        """A softmax over parameters."""
        value = {("delta", "block"): "D_j", ("output", "block"): "X_j", ("delta", "sublayer"): "f_j"}.get(
            (self.source, self.granularity), "x_g"
        )
        skip = {"none": "replaces the stream", "added": "added to the stream", "gated": "added to the stream, gated"}
        return MixingDesign(
            query="none",
            key="none",
            value=f"N({value})" if self.norm == "sources" else value,
            normaliser="softmax" + (", over the rms of the source" if self.norm == "weights" else ""),
            window="all",
            sharing=self.granularity,
            injection=skip[self.skip],
        )

    @model_validator(mode="after")
    def _options_fit(self) -> Self:
        if self.norm in ("weights", "none") and self.norm_kind != "rms":
            raise ConfigError(problem("norm_kind", self.norm_kind, f"left out when norm={self.norm!r}", "remove it"))
        return self

    @property
    def init_equivalence(self) -> InitEquivalence:
        """Exact with a gate that starts at 0, else none."""
        if self.skip == "gated":
            return InitEquivalence("exact", "the gates start at 0, and the residual stream is kept")
        return InitEquivalence("none", "layers read a mean of normalised outputs")

    def sources(self, layer: int) -> int:
        """Sources that a layer reads; the number of layers itself is the final read."""
        return layer + (self.embedding == "source")

    def read_after(self, layer: int, stack: LayerStack) -> bool:
        """Whether a later read uses sources after this layer."""
        return self.head == "mixture" or layer + 1 < n_units(stack, self.granularity)

    def cost(self, site: SublayerPosition, shape: Shape) -> Cost:
        """The read where a layer opens, the adds, and the new source with its norm where a layer closes."""
        width = shape.total_tokens * site.d_model
        layer, opens, closes = unit_of(site, self.granularity)
        cost = self._read_cost(layer, site.stack, shape) if opens else Cost(elementwise_flops=2 * width)
        if closes and (self.source == "output" or self.skip != "none"):
            cost += Cost(elementwise_flops=width)
        return cost + (self._source_cost(site.stack, shape) if closes and self.read_after(layer, site.stack) else Cost())

    def ends_cost(self, stack: LayerStack, shape: Shape) -> Cost:
        """The embedding as a source, and the final read."""
        cost = self._source_cost(stack, shape) if self.embedding == "source" else Cost()
        layers = n_units(stack, self.granularity)
        return cost + (self._read_cost(layers, stack, shape) if self.head == "mixture" else Cost())

    def _read_cost(self, layer: int, stack: LayerStack, shape: Shape) -> Cost:
        n, gated = self.sources(layer), self.skip == "gated"
        if not n:
            return Cost()
        # Operations per number: the sum of more than one source, its norm, the skip and its gate.
        each = 2 * n * (n > 1) + (self.norm == "sum") * self._norm_flops + (self.skip != "none") + gated
        return Cost(params=n * (n > 1) + gated, elementwise_flops=each * shape.total_tokens * stack.d_model)

    def _source_cost(self, stack: LayerStack, shape: Shape) -> Cost:
        each = {"sources": self._norm_flops, "weights": 2}.get(self.norm, 0)
        return Cost(elementwise_flops=each * shape.total_tokens * stack.d_model)

    @property
    def _norm_flops(self) -> int:
        return 6 if self.norm_kind == "layer" else 4

    def build(self, stack: LayerStack) -> "tuple[list[VerticalAttention], VerticalAttentionEnds]":
        """Builds a read where a layer opens, and for the head where it has one."""
        return [VerticalAttention(self, site) for site in stack.sites], VerticalAttentionEnds(self, stack)


class LayerOutputs(NamedTuple):
    """The depth state: the sources as later layers read them, the logarithms of their rms if those set weights, and the rest.

    Between layers the rest is the residual stream if it is kept or if no source equals the next input; inside a layer it
    is the layer's input and the sum of its updates (added together, where nothing needs them apart).
    """

    sources: tuple[Stream, ...]
    log_rms: tuple[Float[Tensor, "B T"], ...]
    rest: tuple[Stream, ...]

    def and_source(self, h: Stream, config: VerticalAttentionConfig, eps: float) -> "LayerOutputs":
        """Returns the state with one more source."""
        if config.norm == "weights":
            return self._replace(sources=(*self.sources, h), log_rms=(*self.log_rms, _log_rms(h, config, eps)))
        new = _normalised(h, config, eps) if config.norm == "sources" else h
        return self._replace(sources=(*self.sources, new))


class Mixture(Combination):
    """One read: a convex sum of the sources and the residual stream if that is kept."""

    def __init__(self, config: VerticalAttentionConfig, n_sources: int, stack: LayerStack) -> None:
        loses_scale = config.source == "delta" and config.embedding == "source" and config.norm in ("sources", "weights")
        scale = stack.update_scale if loses_scale else 1.0
        super().__init__(n_sources, config.newest_logit, False, scale)
        self.config, self.eps = config, stack.norm_eps
        if config.skip == "gated":
            self.gate = self.parameter("gate", (1,), Constant(0.0), "gate")

    def read(self, state: LayerOutputs) -> Stream:
        """Returns the input of the layer: the mixture, added to the residual stream if that is kept."""
        return self._joined(state, self(state.sources, state.log_rms))

    def explain_read(self, state: LayerOutputs, made: Stream) -> Explanation:
        """Returns the mixture with its weights, before its norm and the skip; nothing with one source."""
        first = 0 if self.config.embedding == "source" else 1
        names = tuple(unit_name(first + n, self.config.granularity) for n in range(len(state.sources)))
        return self.explain(state, made, names, partial(self._joined, state))

    def _joined(self, state: LayerOutputs, mixed: Stream) -> Stream:
        """The normalised mixture, added to the residual stream if that is kept."""
        if self.config.norm == "sum":
            mixed = _normalised(mixed, self.config, self.eps)
        if self.config.skip == "none":
            return mixed
        (stream,) = state.rest
        return torch.addcmul(stream, mixed, self.gate) if self.config.skip == "gated" else stream + mixed


class VerticalAttention(DepthMixer, config=VerticalAttentionConfig):
    """See `VerticalAttentionConfig`."""

    def __init__(self, config: VerticalAttentionConfig, site: SublayerPosition) -> None:
        super().__init__()
        self.config, self.eps = config, site.norm_eps
        layer, self.opens, self.closes = unit_of(site, config.granularity)
        self.read_after = config.read_after(layer, site.stack)
        reads = self.opens and config.sources(layer) > 0
        self.mixture = Mixture(config, config.sources(layer), site.stack) if reads else None

    def read(self, state: LayerOutputs, layout: Layout = None, cache: Any = None) -> tuple[Stream, Stream, Any]:
        """Returns the input of the layer plus its updates so far, as view and as carry."""
        if self.opens:
            view = state.rest[0] if self.mixture is None else self.mixture.read(state)
        else:
            view = state.rest[0] if len(state.rest) == 1 else state.rest[0] + state.rest[1]
        return view, view, cache

    def write(self, state: LayerOutputs, update: Stream, context: Views, carry: Stream) -> LayerOutputs:
        """Returns the state with the update added, as a new source when it closes the layer."""
        config = self.config
        # Under autocast the update may be narrower than the stream that it joins.
        update = update.to(carry.dtype)
        sources = state if self.read_after else LayerOutputs((), (), ())
        if not self.closes:
            if config.source == "output":
                return sources._replace(rest=(carry + update,))
            return sources._replace(rest=(carry, update) if self.opens else (state.rest[0], state.rest[1] + update))
        delta = update
        if config.source == "delta" and not self.opens and (self.read_after or config.skip == "none"):
            delta = state.rest[1] + update
        stream = carry + update if config.source == "output" or config.skip != "none" else delta
        h = stream if config.source == "output" else delta
        next_state = sources.and_source(h, config, self.eps) if self.read_after else sources
        keeps_stream = config.skip != "none" or not self.read_after
        return next_state._replace(rest=(stream,) if keeps_stream else ())

    def explain(self, done: Read | Write) -> Explanation:
        """Returns the mixture where a layer opens and reads several sources."""
        if isinstance(done, Write) or self.mixture is None:
            return Explanation()
        return self.mixture.explain_read(done.state, done.views)


class VerticalAttentionEnds(DepthEnds):
    """The embedding is the first source, or the input of the first layer; the model returns the last output or a read."""

    def __init__(self, config: VerticalAttentionConfig, stack: LayerStack) -> None:
        super().__init__()
        self.config, self.eps = config, stack.norm_eps
        n_sources = config.sources(n_units(stack, config.granularity))
        self.mixture = Mixture(config, n_sources, stack) if config.head == "mixture" else None

    def enter(self, embeddings: Stream, layout: Layout = None, cache: Any = None) -> tuple[LayerOutputs, Any]:
        """Returns the embedding as a source, as the residual stream, or as both."""
        config = self.config
        state = LayerOutputs((), (), (embeddings,) if config.skip != "none" or config.embedding == "first_input" else ())
        return state.and_source(embeddings, config, self.eps) if config.embedding == "source" else state, cache

    def leave(self, state: LayerOutputs, layout: Layout = None, cache: Any = None) -> tuple[Stream, Any]:
        """Returns the last output, or the final read."""
        return state.rest[0] if self.mixture is None else self.mixture.read(state), cache

    def explain(self, done: Read) -> Explanation:
        """Returns the final mixture, if any."""
        return Explanation() if self.mixture is None else self.mixture.explain_read(done.state, done.views)


@outside_autocast
def _normalised(h: Stream, config: VerticalAttentionConfig, eps: float) -> Stream:
    if config.norm_kind == "layer":
        return layer_norm(h, eps, config.impl)
    gain = 1.0 if config.norm_kind == "rms" else h.shape[-1] ** -0.5
    return rms_norm(h, h.new_full(h.shape[-1:], gain, dtype=statistics_dtype(h)), eps, config.impl)


@outside_autocast
def _log_rms(h: Stream, config: VerticalAttentionConfig, eps: float) -> Float[Tensor, "B T"]:
    return -torch.log(source_factor(h, eps, config.impl))
