"""Deep Delta Learning: a sublayer overwrites the stream along its own output direction.

Letters: B batch, T position, D width, C value channels of the state (the paper's d_v), k taps of a convolution.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal, Self

import torch
from jaxtyping import Float
from pydantic import Field, field_validator, model_validator
from torch import Tensor

from twoaxis.core.cost import Cost, Shape
from twoaxis.core.design import InitEquivalence, MixingDesign
from twoaxis.core.errors import ConfigError, problem
from twoaxis.core.parameters import Constant, Normal, matrix_std
from twoaxis.core.position import LayerStack, SublayerPosition
from twoaxis.core.views import Views
from twoaxis.depth.base import Controls, DepthConfig, DepthEnds, DepthMixer, Explanation, Layout, Read, Stream, Write
from twoaxis.depth.delta_gate import Gate, gate_cost
from twoaxis.depth.value_channels import ChannelForm, Channels, Compressor
from twoaxis.ops.blend import annealed, blend_cost, blend_parameter
from twoaxis.ops.delta import UpdateRule, components, delta_write, delta_writes
from twoaxis.ops.precision import Impl
from twoaxis.ops.scores import linear_scores, row_product

TARGET_SCALE = 4.0
"""The upper end of the `code` value target."""

_ONE: Mapping[str, Any] = {"value_channels": 1, "compressor": "none", "expansion": "repeat", "context_eps": 1e-5}
_FOUR: Mapping[str, Any] = {**_ONE, "value_channels": 4, "kernel_size": 4}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "ddl": _ONE,
    "ddl_tc": {**_FOUR, "compressor": "time"},
    "ddl_tc_ec": {**_FOUR, "compressor": "time", "expansion": "embedding_conv"},
    "ddl_cc": {**_FOUR, "compressor": "channel"},
    "ddl_cc_ec": {**_FOUR, "compressor": "channel", "expansion": "embedding_conv"},
}
"""Options that each preset fixes. The paper's tables name the forms with EC DDL-TC and DDL-CC, the latter also DDL."""


class DeepDeltaConfig(DepthConfig):
    """Replaces the state's component along the sublayer's output direction by a learned target.

    Equation: k = f(c) / sqrt(|f(c)|^2 + eps^2),  beta = 2 sigmoid(gate(c)),  X' = X + beta k (v^T - k^T X),
              c = Norm(x),  x = compress(X),  v = W_v c (paper) | 4 sigmoid(W_v x + b_v) (code) | W_v x + b_v (code_linear)
              gate(c) = w^T c + b (linear) | w^T tanh(W c) + b (two_layer) | w^T tanh(W c + b_1) + b (two_layer_bias)
              compress (C > 1), per feature i:  time: x_ti = sum_j r_j sum_s w_ijs X_(t-s)ij,
              channel: x_i = sum_r r_r sum_j w_i(j-r+(C-1)//2) X_ij
    Source:   Deep Delta Learning, arXiv:2601.00417v3, eq. 2.1-2.4, sections 3.1 and 3.2, appendix A.1; the authors' PDF of
              2026-07-27; their code yifanzhang-pro/deep-delta-learning, model/DDL-gpt-mha-rope*.py (TC, TC+EC, CC, CC+EC)
              and DDL-vdim1-*.py
    Deviates: `paper` is the target of the text: linear in the normalised context, without a bias. The released code defaults
              to `code`, a sigmoid of the un-normalised input with a bias; which of the two made the published tables cannot
              be established. `code_linear` is the code with its sigmoid off: the default of neither. The two-layer gate has
              a bias in its first layer in the text (two_layer_bias), none in the code (two_layer). The text writes the
              channel compressor as one coefficient per feature and channel, the code and this one as a convolution and a
              read. `write_only` drops k^T X: the control that the paper names and does not run
    Shapes:   state [B T D], or C times [B T D]; update [B T D] -> state; gate, target and statistics in float32
    Init:     NONE: it overwrites along k, so it is never the plain sum. beta starts at beta_init; w_beta, W_v and the
              compressors ~ N(0, 0.25/D), b_v = b_1 = 0, r = 1/C; the embedding convolution starts as C copies. EXACT with a
              blend
    Cost:     params (1 + C)*D + 1 per sublayer (code and code_linear: C more; gate two_layer: gate_width*(D + 1) + 1 for
              D + 1, with its bias gate_width more); per block and for the readout time C*(D*k + 1), channel C*(D + 1);
              embedding convolution C*D*k;
              flops (4 + 6*C)*D per token and sublayer, compressor 2*C*k*D or 2*C*D; state C*D numbers per token;
              time and the embedding convolution carry k - 1 tokens in generation
    Published: validation loss after 49B tokens, tables 3-5; one seed, equal tokens, not equal FLOPs.
              123M parameters: plain 2.8543, C = 1 2.8482, TC 2.8355, CC 2.8321, TC+EC 2.8299, CC+EC 2.8329.
              353M parameters: plain 2.6053, C = 1 2.6039, TC 2.5927, CC 2.5790, TC+EC 2.5905, CC+EC 2.5758

    Args:
        preset: `none`, or a published form by name, which fixes channels, compressor, expansion and context_eps: `ddl`
            (C = 1), `ddl_tc` and `ddl_cc` (C = 4), `ddl_tc_ec` and `ddl_cc_ec` (with EC; the paper's DDL-TC and DDL-CC).
        value_channels: C; 1 is the plain stream.
        compressor: how C channels become the sublayer's input: `time` (TC), `channel` (CC); `none` with one channel.
        expansion: how the embedding becomes C channels: `repeat`, or `embedding_conv` (EC).
        kernel_size: k, the tokens that `time` and `embedding_conv` see.
        value_target: `paper`; `code` as released, for its checkpoints; or `code_linear`, the code with its sigmoid off.
        gate: `linear`; `two_layer` with a tanh between, as released; or `two_layer_bias`, with the bias of the paper's first
            layer.
        gate_width: hidden width of the two-layer gate.
        beta_init: the gate's starting value, in (0, 2); 1 replaces the component fully, 2 reflects it.
        update_rule: `delta`, or `write_only` (X' = X + beta k v^T).
        direction_eps: eps of the direction's norm.
        context_eps: eps of every RMSNorm of the model, instead of its norm_eps; None keeps that. The authors use 1e-5.
        blend: `none`, or `annealed` (C = 1): x + (1 - g) f + g (X' - x), g from 0 on, by a recipe or learned.
        impl: `fused` or `reference`.

    Raises:
        ConfigError: beta_init outside (0, 2), several channels without a compressor, a blend of several channels or of another
            eps than the model's, options that a preset fixes otherwise, or a kernel_size or gate_width that nothing reads.

    Example:
        >>> DeepDeltaConfig(preset="ddl_cc_ec").value_channels, DeepDeltaConfig().value_target
        (4, 'paper')
    """

    kind: Literal["deep_delta"] = "deep_delta"
    preset: Literal["none", "ddl", "ddl_tc", "ddl_tc_ec", "ddl_cc", "ddl_cc_ec"] = "none"
    value_channels: int = Field(default=1, ge=1)
    compressor: Literal["none", "time", "channel"] = "none"
    expansion: Literal["repeat", "embedding_conv"] = "repeat"
    kernel_size: int = Field(default=4, ge=1)
    value_target: Literal["paper", "code", "code_linear"] = "paper"
    gate: Literal["linear", "two_layer", "two_layer_bias"] = "linear"
    gate_width: int = Field(default=128, ge=1)
    beta_init: float = 1.0
    update_rule: UpdateRule = "delta"
    direction_eps: float = Field(default=1e-5, gt=0)
    context_eps: float | None = Field(default=None, gt=0)
    blend: Literal["none", "annealed"] = "none"
    impl: Impl = "fused"

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = PRESETS

    @property
    def design(self) -> MixingDesign:
        """A write that replaces the component of the state along the update by the target."""
        target = {"paper": "W_v c", "code": "4 sigmoid(W_v x + b_v)", "code_linear": "W_v x + b_v"}[self.value_target]
        erases = self.update_rule == "delta"
        return MixingDesign(
            query="k = unit update" if erases else "none",
            key="k^T X" if erases else "none",
            value=f"{target}, along k",
            normaliser="gate 2 sigmoid, |k| = 1",
            window="own state" if self.value_channels == 1 else "own state, C channels",
            sharing="sublayer",
            injection="overwrites the stream along k" if erases else "added to the stream along k",
            weights="input and reader",
            position=self.compressor == "time" or self.expansion == "embedding_conv",
        )

    @field_validator("beta_init")
    @classmethod
    def _open_interval(cls, value: float) -> float:
        if not 0 < value < 2:
            raise ConfigError(problem("beta_init", value, "inside (0, 2), the range of the gate", "use the authors' 1.0"))
        return value

    @model_validator(mode="after")
    def _options_fit(self) -> Self:
        if self.value_channels > 1 and self.compressor == "none":
            remedy = "use 'channel' or 'time', or one channel"
            raise ConfigError(problem("compressor", "none", f"given for value_channels={self.value_channels}", remedy))
        if self.value_channels == 1 and (self.compressor, self.expansion) != ("none", "repeat"):
            what, got = ("expansion", self.expansion) if self.compressor == "none" else ("compressor", self.compressor)
            allowed = "left out with value_channels=1"
            raise ConfigError(problem(what, got, allowed, "the authors use value_channels=4 with it"))
        if self.value_channels > 1 and self.blend != "none":
            raise ConfigError(problem("blend", self.blend, "'none' with several value channels", "use value_channels=1"))
        if self.context_eps is not None and self.blend != "none":
            allowed = "left out with a blend, which starts as the plain model and keeps its norms"
            raise ConfigError(problem("context_eps", self.context_eps, allowed, "set norm_eps of the model"))
        if self.compressor != "time" and self.expansion != "embedding_conv":
            self.refuse_options(("kernel_size",), ", since nothing is convolved along positions", "remove it, or use 'time'")
        if self.gate == "linear":
            self.refuse_options(("gate_width",), ", since a linear gate has no hidden layer", "remove it, or use another gate")
        return self

    def prepare(self, stack: LayerStack) -> LayerStack:
        """Returns the stack with norms of this eps."""
        stack = super().prepare(stack)
        return stack if self.context_eps is None else replace(stack, norm_eps=self.context_eps)

    def controls(self) -> Controls:
        """The same without erasing."""
        write_only = {**self.to_data(), "update_rule": "write_only"} if self.update_rule == "delta" else None
        return Controls(write_only=write_only, streams=self.value_channels)

    @property
    def init_equivalence(self) -> InitEquivalence:
        """None; exact with a blend."""
        if self.blend == "annealed":
            return InitEquivalence("exact", "the blend starts at 0, where every write is the plain sum")
        return InitEquivalence("none", "it overwrites along the update's direction, so it is never the plain sum")

    @property
    def channels(self) -> ChannelForm:
        """How channels are compressed and initialised."""
        return ChannelForm(self.compressor, self.expansion, self.value_channels, self.kernel_size, self.impl)

    def cost(self, site: SublayerPosition, shape: Shape) -> Cost:
        """Gate and target by their weights, one write per channel, and the compressor, owned by the first of its block."""
        D, N, C = site.d_model, shape.total_tokens, self.value_channels
        target_flops = 2 * D if C == 1 else 0
        write_flops = 2 * D + (4 if self.update_rule == "delta" else 2) * D * C
        added = self.channels.compressor_cost(D, N, owned=site.opens_block)
        added += Cost() if self.blend == "none" else blend_cost(shape, D)
        return (
            added
            + gate_cost(self.gate, self.gate_width, D, N)
            + Cost(
                params=C * D + (0 if self.value_target == "paper" else C),
                matmul_flops=2 * N * C * D if C > 1 else 0,
                elementwise_flops=N * (target_flops + write_flops),
            )
        )

    def ends_cost(self, stack: LayerStack, shape: Shape) -> Cost:
        """The readout, and the convolution of the embeddings."""
        D, N = stack.d_model, shape.total_tokens
        return self.channels.expansion_cost(D, N) + self.channels.compressor_cost(D, N)

    def build(self, stack: LayerStack) -> "tuple[list[DeepDelta], DepthEnds]":
        """Builds the mixers, which share the compressor of the first of their block, and the ends."""
        mixers, shared = list[DeepDelta](), None
        for site in stack.sites:
            mixers.append(DeepDelta(self, site, None if site.opens_block else shared))
            shared = mixers[-1].compress
        return mixers, self.channels.build_ends(stack.d_model)


class DeepDelta(DepthMixer, config=DeepDeltaConfig):
    """See `DeepDeltaConfig`; usable outside our decoder.

    Example:
        >>> mixer = DeepDelta(d_model=4)
        >>> x, update = torch.ones(1, 1, 4), torch.tensor([[[1.0, 0.0, 0.0, 0.0]]])
        >>> mixer.write(x, update, context=x, carry=None)[..., 1:].tolist()
        [[[1.0, 1.0, 1.0]]]
    """

    def __init__(self, config: DeepDeltaConfig, site: SublayerPosition, shared: Compressor | None = None) -> None:
        super().__init__()
        self.config, d_model, C = config, site.d_model, config.value_channels
        options = config.gate, config.gate_width, d_model, config.beta_init, config.impl, site.stack.update_scale
        self.gate, shape, start = Gate(*options), (d_model,) if C == 1 else (C, d_model), Normal(matrix_std(d_model))
        self.target_weight = self.parameter("target_weight", shape, start, "gate", grows="inputs")
        if config.value_target != "paper":
            self.target_bias = self.parameter("target_bias", (C,), Constant(0.0), "bias")
        self.blend = blend_parameter(self) if config.blend == "annealed" else None
        self.compressor = config.channels.build_compressor(d_model) if shared is None else None
        # In a tuple, so that only the first sublayer of the block registers it.
        self._shared = (shared,)

    @classmethod
    def build_alone(cls, config: Any, site: SublayerPosition) -> DepthMixer:
        """Builds the mixer of one sublayer, with a compressor of its own."""
        return cls(config, config.prepare(site.stack).sites[site.index])

    @property
    def compress(self) -> Compressor | None:
        """The compressor, its own or that of the block; None with one channel."""
        return self.compressor if self._shared[0] is None else self._shared[0]

    def read(self, state: Any, layout: Layout = None, cache: Any = None) -> tuple[Stream, Any, Any]:
        """Returns the stream, or the compressed channels, also as the carry."""
        if self.compress is None:
            return state, None, cache
        x, cache = self.compress(state, layout, cache)
        return x, x, cache

    def write(self, state: Any, update: Stream, context: Views, carry: Any) -> Any:
        """Returns the state with its component along the update moved towards the target."""
        assert isinstance(context, Tensor), "the read returns one view, so the context is one tensor"
        config, beta = self.config, self.gate(context)
        if carry is None:
            target = self.target(state, context).unsqueeze(-1)
            beta = beta.unsqueeze(-1)
            written = delta_write(state, update, target, beta, config.direction_eps, config.update_rule, config.impl)
            return written if self.blend is None else annealed(state + update.to(state.dtype), written, self.blend)
        targets = self.target(carry, context)
        return delta_writes(state, update, targets, beta, config.direction_eps, config.update_rule, config.impl)

    def explain(self, done: Read | Write) -> Explanation:
        """Returns the gate beta, and the distance of k^T X from its target before and after the write, over all channels."""
        if isinstance(done, Read):
            return Explanation()
        state, update, context, carry, written = done
        assert isinstance(context, Tensor), "the read returns one view, so the context is one tensor"
        target = self.target(state if carry is None else carry, context)
        targets = target.unsqueeze(0) if carry is None else target

        def discrepancy(of: Any) -> Float[Tensor, "B T"]:
            channels: Channels = (of,) if carry is None else of
            return torch.linalg.vector_norm(components(channels, update, self.config.direction_eps) - targets, dim=0)

        return Explanation(gauges={"beta": self.gate(context), "before": discrepancy(state), "after": discrepancy(written)})

    def target(self, x: Stream, context: Stream) -> Float[Tensor, "B T"] | Float[Tensor, "C B T"]:
        """Returns the value that replaces the component of the stream, or of each channel."""
        product = row_product if self.target_weight.ndim == 1 else linear_scores
        if self.config.value_target == "paper":
            return product(context, self.target_weight, self.config.impl)
        linear = product(x, self.target_weight, self.config.impl)
        linear = linear + self.target_bias.view(-1, *(1,) * (linear.ndim - 1))
        return TARGET_SCALE * torch.sigmoid(linear) if self.config.value_target == "code" else linear
