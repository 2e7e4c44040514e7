"""Per-layer embeddings: behind every block, the stream gates a vector of the token and of its embedding, which is added to it.

Letters: B batch, T position, D width, L blocks, V vocabulary, p width of the vectors.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch.nn.functional as F
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor

from twoaxis.core.cost import Cost, Shape
from twoaxis.core.design import InitEquivalence, MixingDesign
from twoaxis.core.mixer import ALONE
from twoaxis.core.parameters import Constant, Normal, matrix_std
from twoaxis.core.position import LayerStack, SublayerPosition
from twoaxis.core.views import Heads, Views
from twoaxis.depth.around import Around, AroundConfig, check_one_stream, token_ids
from twoaxis.depth.base import DepthEnds, DepthMixer, Explanation, Layout, Read, Stream
from twoaxis.ops.norm import rms_norm
from twoaxis.ops.precision import Impl


class PerLayerEmbeddingConfig(AroundConfig):
    """Adds to the stream, behind every block, a vector of the token that the stream gates; another depth mixer has the rest.

    Equation: x the stream after the write of a block, e the embeddings, t the id of the token, N RMS norms with a gain:
              v = (N_p(W_m e / sqrt(D)) + sqrt(p) E[t]) / sqrt(2);  x' = s (x + N(W_o (gelu_tanh(W_g x) * v)))
              E, W_m, W_g, W_o, N and s of every block, N_p one for all; gemma3n: s = 1
    Source:   Gemma 4 and Gemma 3n: transformers 5.24, models/gemma4, Gemma4TextModel.project_per_layer_inputs and
              Gemma4TextDecoderLayer (no paper)
    Deviates: s is a buffer there, which training leaves alone and checkpoints set; here it is a parameter. Gemma 3n adds the
              vector to all streams of AltUp but the one that gates it; here there is one. e are the embeddings as they enter
              the stack, at any scale. The norms behind sublayers of both models are for `stream` to have. Vectors without
              token ids are refused; Gemma 4 then searches its embedding for them. The initial values of the training of both
              are not published, these are ours
    Shapes:   state (state of `stream`, one tensor [B T D]; e [B T D]); update [B T D] -> state; norms in float32
    Init:     NONE; as `stream` with init="plain", where the gain of N starts at 0. E ~ N(0, 1/p), so that both terms of v have
              rms 1; matrices ~ N(0, 0.25/fan_in), s = 1, other gains 1
    Cost:     beyond `stream`, per block: params V*p + 3*p*D + D + 1, and p once; flops 6*p*D in matrix products and
              6*D + 12*p more per token; D numbers per token more in the state; one row of E is read per token
    Published: no ablation in a paper is known to us

    Args:
        preset: `gemma4`, or `gemma3n`, which has no s.
        d_embedding: p.
        stream: the depth mixer of the residual stream, by table or bare kind; its state is one stream.
        init: `random`, or `plain` for a model that starts as without the vectors.
        impl: of the norms, `fused` or `reference`.

    Raises:
        ConfigError: a model whose vocabulary is unknown, or a `stream` whose state is more than one stream; in a pass, vectors
            without token ids.

    Example:
        >>> PerLayerEmbeddingConfig(init="plain").init_equivalence.relation
        'exact'
    """

    kind: Literal["per_layer_embedding"] = "per_layer_embedding"
    preset: Literal["gemma4", "gemma3n"] = "gemma4"
    d_embedding: int = Field(default=256, ge=1)
    init: Literal["random", "plain"] = "random"
    impl: Impl = "fused"

    @property
    def design(self) -> MixingDesign:
        """A gated vector of the token; the rest is the mixer of the stream."""
        inner = self.stream.design
        return replace(
            inner,
            query="W_g h_l",
            key="e, E[t]",
            value="h_l, N(W_o (gelu(W_g h_l) * v))",
            normaliser="norm of the added term",
            window=f"{inner.window}, e",
            sharing="sublayer" if inner.sharing == "sublayer" else "block",
            injection="added to the stream between blocks",
            weights="input and reader",
            literal=False,
        )

    @property
    def init_equivalence(self) -> InitEquivalence:
        """That of the stream when the gain of the added term starts at zero."""
        if self.init == "plain":
            found = self.stream.init_equivalence
            return InitEquivalence(found.relation, f"zeros are added behind blocks; the stream: {found.reason}")
        return InitEquivalence("none", "a gated vector of the token is added behind every block")

    def prepare(self, stack: LayerStack) -> LayerStack:
        """Refuses a stream of several tensors, and a model whose vocabulary is unknown."""
        stack = super().prepare(stack)
        check_one_stream(self.stream, stack)
        return stack

    def cost(self, site: SublayerPosition, shape: Shape) -> Cost:
        """The table, the maps and the norms where a block closes, beyond the stream."""
        cost, V = super().cost(site, shape), site.stack.vocab_size
        if not site.closes_block or V is None:
            return cost
        N, D, p, scales = shape.total_tokens, site.d_model, self.d_embedding, int(self.preset == "gemma4")
        params, each = (V + 3 * D) * p + D + scales, (5 + scales) * D + 12 * p
        return cost + Cost(params, 6 * N * p * D, elementwise_flops=N * each, shared_params=p, table_params=V * p)

    def ends_cost(self, stack: LayerStack, shape: Shape) -> Cost:
        """The gain that all blocks share, beyond the ends of the stream."""
        return super().ends_cost(stack, shape) + Cost(params=self.d_embedding)

    def build(self, stack: LayerStack) -> "tuple[list[PerLayerEmbedding], PerLayerEnds]":
        """Builds the injection of every block around the mixers of the stream, and the gain that they share."""
        mixers, ends = self.stream.build(stack)[0], PerLayerEnds(self)
        return [PerLayerEmbedding(self, site, one, ends) for one, site in zip(mixers, stack.sites, strict=True)], ends


class StreamBesideEmbedding(NamedTuple):
    """The depth state: the stream, and the embeddings that the vectors of later blocks are computed from."""

    stream: Stream
    embedding: Stream


class PerLayerEmbedding(Around, config=PerLayerEmbeddingConfig):
    """See `PerLayerEmbeddingConfig`; only the last sublayer of a block adds anything.

    Args:
        config: the options.
        site: of the sublayer.
        stream: the mixer of the stream there.
        owner: the ends, which have the gain that all blocks share.
    """

    around: ClassVar[Mapping[str, Any]] = {**ALONE, "vocab_size": None}

    def __init__(
        self, config: PerLayerEmbeddingConfig, site: SublayerPosition, stream: DepthMixer, owner: "PerLayerEnds"
    ) -> None:
        super().__init__(stream)
        self.mixes_heads, self.closes_block, self.eps = stream.mixes_heads, site.closes_block, site.norm_eps
        self.impl: Impl = config.impl
        V, D, p = site.stack.vocab_size, site.d_model, config.d_embedding
        assert V is not None, "the stack knows the vocabulary"
        if not self.closes_block:
            return
        # In a tuple, so that only its owner registers it.
        self._owner = (owner,)
        # No nn.Linear and no nn.Embedding: hosts initialise those again.
        self.table = self.parameter("table", (V, p), Normal(p**-0.5), "table")
        self.context_map = self.parameter("context_map", (p, D), Normal(matrix_std(D)), "matrix", grows="inputs")
        self.gate = self.parameter("gate", (p, D), Normal(matrix_std(D)), "matrix", grows="inputs")
        self.output = self.parameter("output", (D, p), Normal(matrix_std(p)), "matrix", grows="outputs")
        # What is normalised joins the stream itself, with the factor of an update in its gain.
        start = Constant(0.0 if config.init == "plain" else site.stack.update_scale)
        self.gain = self.parameter("gain", (D,), start, "norm", stacked=1)
        self.scale = self.parameter("scale", (1,), Constant(1.0), "mixing", stacked=1) if config.preset == "gemma4" else None

    @classmethod
    def build_alone(cls, config: Any, site: SublayerPosition) -> DepthMixer:
        """Builds the mixer of one sublayer, with a gain of its own."""
        mixer: Any = super().build_alone(config, site)
        if mixer.closes_block:
            mixer.ends = mixer._owner[0]
        return mixer

    def read(self, state: StreamBesideEmbedding, layout: Layout = None, cache: Any = None) -> tuple[Views, Any, Any]:
        """Returns the view of the stream; the carry is that of its mixer and, where a block closes, the ids of the tokens."""
        views, carry, cache = super().read(state.stream, layout, cache)
        ids = token_ids(layout, "per_layer_embedding") if self.closes_block else None
        return views, (carry, ids), cache

    def mix_heads(self, heads: Heads, context: Views, state: Any, layout: Layout = None) -> tuple[Heads, Any]:
        """Returns the heads that the mixer of the stream makes."""
        heads, stream = super().mix_heads(heads, context, state.stream, layout)
        return heads, state._replace(stream=stream)

    def write(self, state: StreamBesideEmbedding, update: Tensor, context: Views, carry: Any) -> StreamBesideEmbedding:
        """Returns the stream after its write and, where a block closes, after the vector of the token is added."""
        inner, ids = carry
        stream = super().write(state.stream, update, context, inner)
        return state._replace(stream=stream if ids is None else self._injected(stream, state.embedding, ids))

    def explain(self, done: Any) -> Explanation:
        """Returns the weights of the read of the stream."""
        if not isinstance(done, Read):
            return Explanation()
        return super().explain(Read(done.state.stream, done.views, done.carry[0]))

    def vector(self, embedding: Stream, ids: Int[Tensor, "B T"]) -> Float[Tensor, "B T p"]:
        """What the stream gates: the mean of a map of the embedding and of the row of the token, times sqrt(2)."""
        p, D = self.context_map.shape
        mapped = F.linear(embedding, self.context_map) * D**-0.5
        context = rms_norm(mapped, self._owner[0].context_gain, self.eps, self.impl)
        return (context + F.embedding(ids, self.table) * math.sqrt(p)) * math.sqrt(0.5)

    def _injected(self, stream: Stream, embedding: Stream, ids: Int[Tensor, "B T"]) -> Stream:
        gated = F.gelu(F.linear(stream, self.gate), approximate="tanh") * self.vector(embedding, ids)
        joined = stream + rms_norm(F.linear(gated, self.output), self.gain, self.eps, self.impl)
        return joined if self.scale is None else joined * self.scale


class PerLayerEnds(DepthEnds):
    """The embeddings are the first stream too; the ends own the gain that all blocks share."""

    shares_parameters = True

    def __init__(self, config: PerLayerEmbeddingConfig) -> None:
        super().__init__()
        self.context_gain = self.parameter("context_gain", (config.d_embedding,), Constant(1.0), "norm")

    def enter(self, embeddings: Stream, layout: Layout = None, cache: Any = None) -> tuple[StreamBesideEmbedding, Any]:
        """Returns the embeddings twice."""
        return StreamBesideEmbedding(embeddings, embeddings), cache

    def leave(self, state: StreamBesideEmbedding, layout: Layout = None, cache: Any = None) -> tuple[Stream, Any]:
        """Returns the stream."""
        return state.stream, cache
