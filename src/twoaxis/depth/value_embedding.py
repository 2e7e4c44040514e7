"""Value embeddings: attention in some layers adds a row of a table of tokens to its values.

Letters: B batch, T position, D width, G kv-heads, K key width, V vocabulary, L blocks, W channels that a gate sees.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from twoaxis.core.cost import Cost, Shape
from twoaxis.core.design import InitEquivalence, MixingDesign, Sharing
from twoaxis.core.errors import ConfigError, problem
from twoaxis.core.mixer import ALONE_IN_ATTENTION
from twoaxis.core.parameters import Constant, Normal, Uniform, UniformBetween
from twoaxis.core.position import LayerStack, SublayerPosition
from twoaxis.core.views import QKV, Heads, Views
from twoaxis.depth.around import Around, AroundConfig, token_ids
from twoaxis.depth.base import Controls, DepthEnds, DepthMixer, Layout, State
from twoaxis.ops.precision import Impl, outside_autocast, statistics_dtype
from twoaxis.ops.scores import linear_scores

Layers = Literal["alternate"] | Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)]

NANOCHAT_CHANNELS, MODDED_CHANNELS = 12, 6
"""The first numbers of the input that a gate sees, and with `modded` as many of the row."""

LARGEST = {"nanochat": 3.0, "modded": 2.0}
"""The upper end of a gate."""


class ValueEmbeddingConfig(AroundConfig):
    """Adds a row of a table of tokens to the values of attention in some layers; another depth mixer has the stream.

    Equation: V'_j = V_j + g_j E_j[t] for each kv-head j, in the place of V before attention, t the id of the token
              nanochat: g_j = 3 sigmoid(w_j c[:12]);  modded: g_j = 2 sigmoid(w_j (c[:6], E[t][:6]));  none: g_j = 1
    Source:   karpathy/nanochat, gpt.py at 92d63d4, value_embeds and ve_gate (no paper); modded: KellerJordan/modded-nanogpt,
              PR #218 (no paper), where E[t] is the whole row
    Deviates: a gate sees no more numbers than c and E[t] have. Every sublayer with heads in one of the layers has a table, and
              what a local mixer of attention does to its input is no part of c. nanochat decays tables by 0.01; none decays
              here. Its rest is stream={kind="residual_scalars", embedding="normalised_start", granularity="block",
              backout_layer="middle", init="nanochat"}, without the smear. The start of the gates of modded is ours
    Shapes:   state that of `stream`; heads [B T G K]; gates in float32
    Init:     NONE as published: E uniform in +-sqrt(3/D), w in [0, 0.02] (modded: E ~ N(0, 0.0001), w = 0); as `stream` with
              init="plain", where E = 0. nanochat trains E at half the rate of the embedding, as declared here
    Cost:     beyond `stream`: params V*G*K and G*W in each of the layers, W = 12 or 0; flops 2*G*W in matrix products and
              2*G*K + 4*G more per token; one row of E is read per token, nothing is cached
    Published: no ablation in a paper is known to us

    Args:
        gate: of `nanochat` or `modded`, or `none`.
        layers: `alternate`: every other block, the last one included; or a list of blocks, counted from 0.
        stream: the depth mixer of the residual stream, by table or bare kind.
        init: `published`, or `plain` for a model that starts as without the tables.
        impl: of the scores, `fused` or `reference`.

    Raises:
        ConfigError: layers that the model does not have or that have no heads, or a model whose vocabulary is unknown; in a
            pass, vectors without token ids.

    Example:
        >>> ValueEmbeddingConfig(init="plain").init_equivalence.relation
        'exact'
    """

    kind: Literal["value_embedding"] = "value_embedding"
    gate: Literal["nanochat", "modded", "none"] = "nanochat"
    layers: Layers = "alternate"
    init: Literal["published", "plain"] = "published"
    impl: Impl = "fused"

    @property
    def design(self) -> MixingDesign:
        """A gated row beside the own values; the stream is that of its mixer."""
        gated, inner = self.gate != "none", self.stream.design
        own: Sharing = "block" if self.layers == "alternate" else "model"
        return replace(
            inner,
            query="parameter w_j" if gated else "none",
            key={"nanochat": "c", "modded": "c, E[t]"}.get(self.gate, "none"),
            value="own values, E[t]",
            normaliser="sigmoid" if gated else "none",
            sharing=inner.sharing if inner.sharing in ("block", "sublayer") else own,
            injection="added to values",
            weights="input and reader" if gated else inner.weights,
            literal=False,
            heads="across" if self.gate == "modded" or inner.heads == "across" else "each",
        )

    @property
    def init_equivalence(self) -> InitEquivalence:
        """That of the stream when the tables start at zero."""
        if self.init == "plain":
            found = self.stream.init_equivalence
            return InitEquivalence(found.relation, f"rows of zeros are added to values; the stream: {found.reason}")
        return InitEquivalence("none", "rows of a random table are added to values")

    def controls(self) -> Controls:
        """The same without a gate."""
        static = self.replace(gate="none").to_data() if self.gate != "none" else None
        return super().controls()._replace(static=static)

    def prepare(self, stack: LayerStack) -> LayerStack:
        """Refuses layers that the model does not have, or without heads, and a model whose vocabulary is unknown."""
        stack = super().prepare(stack)
        if self.layers != "alternate" and max(self.layers) >= stack.n_blocks:
            allowed = f"below the {stack.n_blocks} blocks of the model"
            raise ConfigError(problem("layers", list(self.layers), allowed, "count from 0, or use 'alternate'"))
        if not any(self.has_table(site) for site in stack.sites):
            raise ConfigError(
                problem(
                    "layers", self.layers, "blocks with a sublayer that has heads", f"add 'attention', or drop {self.kind!r}"
                )
            )
        return stack

    def has_table(self, site: SublayerPosition) -> bool:
        """Whether this sublayer adds rows to its values."""
        last = site.stack.n_blocks - 1
        chosen = (site.block - last) % 2 == 0 if self.layers == "alternate" else site.block in self.layers
        return chosen and site.slot.heads is not None

    def gate_channels(self, d_model: int, width: int) -> tuple[int, int]:
        """Numbers of the input, and of a row of this width, that a gate sees."""
        if self.gate == "none":
            return 0, 0
        if self.gate == "nanochat":
            return min(NANOCHAT_CHANNELS, d_model), 0
        return min(MODDED_CHANNELS, d_model), min(MODDED_CHANNELS, width)

    def cost(self, site: SublayerPosition, shape: Shape) -> Cost:
        """The table, the gates, and one multiply-add per number, beyond the stream."""
        cost, heads, V = super().cost(site, shape), site.slot.heads, site.stack.vocab_size
        if not self.has_table(site) or heads is None or V is None:
            return cost
        N, G, width = shape.total_tokens, heads.n_kv_heads, heads.n_kv_heads * heads.head_dim
        gates = G * sum(self.gate_channels(site.d_model, width))
        each = 2 * width + 4 * G * (gates > 0)
        return cost + Cost(V * width + gates, 2 * N * gates, elementwise_flops=N * each, table_params=V * width)

    def build(self, stack: LayerStack) -> tuple[list[DepthMixer], DepthEnds]:
        """Builds a table in each of the layers, and the mixers of the stream."""
        mixers, ends = self.stream.build(stack)
        pairs = zip(mixers, stack.sites, strict=True)
        return [ValueEmbedding(self, site, one) if self.has_table(site) else one for one, site in pairs], ends


class ValueEmbedding(Around, config=ValueEmbeddingConfig):
    """See `ValueEmbeddingConfig`: the mixer of attention in one of the layers.

    Args:
        config: the options.
        site: of the sublayer.
        stream: the mixer of the stream there.
    """

    around: ClassVar[Mapping[str, Any]] = {**ALONE_IN_ATTENTION, "vocab_size": None}

    def __init__(self, config: ValueEmbeddingConfig, site: SublayerPosition, stream: DepthMixer) -> None:
        super().__init__(stream)
        self.config, heads, V, D = config, site.slot.heads, site.stack.vocab_size, site.d_model
        assert heads is not None and V is not None, "a layer with a table has heads, and a known vocabulary"
        G, K = heads.n_kv_heads, heads.head_dim
        self.channels = config.gate_channels(D, G * K)
        random = Normal(0.01) if config.gate == "modded" else Uniform(math.sqrt(3 / D))
        start = Constant(0.0) if config.init == "plain" else random
        lr_scale = 0.5 if config.gate == "nanochat" else 1.0
        # With heads as a dimension, which tensor ranks divide.
        self.table = self.parameter("table", (V, G, K), start, "table", lr_scale=lr_scale)
        if config.gate != "none":
            weight = UniformBetween(0.0, 0.02) if config.gate == "nanochat" else Constant(0.0)
            self.gate_weight = self.parameter("gate_weight", (G, sum(self.channels)), weight, "gate")

    def mix_heads(self, heads: Heads, context: Views, state: State, layout: Layout = None) -> tuple[Heads, State]:
        """Returns the heads with rows added to their values, behind what the mixer of the stream makes of them."""
        heads, state = super().mix_heads(heads, context, state, layout)
        row = F.embedding(token_ids(layout, self.config.kind), self.table.flatten(1))
        read = context.v if isinstance(context, QKV) else context
        return heads._replace(v=self._added(heads.v, row.unflatten(-1, heads.v.shape[2:]), read)), state

    @outside_autocast
    def _added(self, v: Float[Tensor, "B T G K"], row: Float[Tensor, "B T G K"], read: Float[Tensor, "B T D"]) -> Tensor:
        if self.config.gate == "none":
            return (v + row).to(v.dtype)
        of_input, of_row = self.channels
        seen = read[..., :of_input]
        if of_row:
            seen = torch.cat((seen, row.flatten(2)[..., :of_row].to(seen.dtype)), dim=-1)
        scores = linear_scores(seen, self.gate_weight, self.config.impl).permute(1, 2, 0)
        gate = LARGEST[self.config.gate] * torch.sigmoid(scores).unsqueeze(-1)
        return torch.addcmul(v.to(gate.dtype), gate, row.to(statistics_dtype(row))).to(v.dtype)
