"""Deep Delta Learning: a sublayer overwrites the stream along its own output direction.

Letters: B batch, T position, D width, C value channels of the state (the paper's d_v), k taps of a convolution.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Self, cast

import torch
from jaxtyping import Float
from pydantic import Field, field_validator, model_validator
from torch import Tensor
from torch.nn.functional import pad

from twoaxis.core.cost import Cost, Shape
from twoaxis.core.equivalence import InitEquivalence
from twoaxis.core.errors import ConfigError, problem
from twoaxis.core.layout import TokenLayout
from twoaxis.core.mixing_design import MixingDesign
from twoaxis.core.parameters import Constant, DeclaredModule, Normal, Values, matrix_std
from twoaxis.core.site import Site, Stack
from twoaxis.core.state import Flow, Leaf, Numbers, stream
from twoaxis.core.views import Views
from twoaxis.depth.base import DepthConfig, DepthEnds, DepthMixer, StreamEnds
from twoaxis.ops.anneal import annealed, blend_cost, blend_parameter
from twoaxis.ops.causal_conv import causal_conv, causal_conv_sum, next_history
from twoaxis.ops.delta import UpdateRule, components, delta_write, delta_writes
from twoaxis.ops.linear_scores import linear_scores
from twoaxis.ops.mix import mix
from twoaxis.ops.precision import Impl, outside_autocast, statistics_dtype
from twoaxis.ops.row_product import row_product

ValueTarget = Literal["code", "code_linear", "paper"]
TARGET_SCALE = 4.0
"""The upper end of the `code` value target."""


class DeepDeltaConfig(DepthConfig):
    """Replaces the state's component along the sublayer's output direction by a learned target.

    Equation: k = f(c) / sqrt(|f(c)|^2 + eps^2),  beta = 2 sigmoid(gate(c)),  X' = X + beta k (v^T - k^T X),
              c = Norm(x),  x = compress(X),  v = 4 sigmoid(W_v x + b_v) (code) | W_v x + b_v (code_linear) | W_v c (paper)
              compress (C > 1), per feature i:  time: x_ti = sum_j r_j sum_s w_ijs X_(t-s)ij,
              channel: x_i = sum_r r_r sum_j w_i(j-r+(C-1)//2) X_ij
    Source:   Deep Delta Learning, arXiv:2601.00417v1, eq. 2.5 and sections 3.2-3.4; authors' code
              yifanzhang-pro/deep-delta-learning, model/DDL-gpt-mha-rope*.py (TC, TC+EC, CC, CC+EC) and DDL-vdim1-*.py
    Deviates: the paper and its code disagree on the target v; both are named, and `code` is the default since the
              published numbers were presumably made with it. `write_only` drops k^T X: the control the paper names
    Shapes:   state [B T D], or C times [B T D]; update [B T D] -> state; gate, target and statistics in float32
    Init:     NONE: it overwrites along k, so it is never the plain sum. beta starts at beta_init; w_beta, W_v and the
              compressors ~ N(0, 0.25/D), b_v = 0, r = 1/C; the embedding convolution starts as C copies. EXACT with a blend
    Cost:     params (1 + C)*(D + 1) per sublayer (gate two_layer: gate_width*(D+1) + 1 for D + 1; paper: C less); per block
              and for the readout time C*(D*k + 1), channel C*(D + 1); embedding convolution C*D*k;
              flops (4 + 6*C)*D per token and sublayer, compressor 2*C*k*D or 2*C*D; state C*D numbers per token; moves
              4*D of them per sublayer, with a compressor (4 + 3*C)*D (paper: D less);
              time and the embedding convolution carry k - 1 tokens in generation
    Published: 123M parameters, 49B tokens, loss 2.854 -> 2.830 (time), 2.833 (channel), 2.848 (C = 1); one seed, Table 3

    Args:
        value_channels: C; 1 is the plain stream.
        compressor: how C channels become the sublayer's input: `time` (TC), `channel` (CC); `none` with one channel.
        expansion: how the embedding becomes C channels: `repeat`, or `embedding_conv` (EC).
        kernel_size: k, the tokens that `time` and `embedding_conv` see.
        value_target: `code`, `code_linear` (the code with its sigmoid off) or `paper`.
        gate: `linear`, or `two_layer` with a tanh between.
        gate_width: hidden width of the two-layer gate.
        beta_init: the gate's starting value, in (0, 2); 1 replaces the component fully, 2 reflects it.
        update_rule: `delta`, or `write_only` (X' = X + beta k v^T).
        direction_eps: eps of the direction's norm.
        blend: `none`, or `annealed` (C = 1): x + (1 - g) f + g (X' - x), g from 0 on, by a recipe or learned.
        impl: `fused` or `reference`.

    Raises:
        ConfigError: beta_init outside (0, 2), several channels without a compressor, or a blend of several channels.

    Example:
        >>> DeepDeltaConfig(value_target="paper").init_equivalence.relation
        'none'
    """

    kind: Literal["deep_delta"] = "deep_delta"
    value_channels: int = Field(default=1, ge=1)
    compressor: Literal["none", "time", "channel"] = "none"
    expansion: Literal["repeat", "embedding_conv"] = "repeat"
    kernel_size: int = Field(default=4, ge=1)
    value_target: ValueTarget = "code"
    gate: Literal["linear", "two_layer"] = "linear"
    gate_width: int = Field(default=128, ge=1)
    beta_init: float = 1.0
    update_rule: UpdateRule = "delta"
    direction_eps: float = Field(default=1e-5, gt=0)
    blend: Literal["none", "annealed"] = "none"
    impl: Impl = "fused"

    @property
    def design(self) -> MixingDesign:
        """A write that takes out what the state holds along the update before it puts the target there."""
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
            raise ConfigError(problem("beta_init", value, "inside (0, 2), where the gate lives", "use the authors' 1.0"))
        return value

    @model_validator(mode="after")
    def _channels_are_compressed(self) -> Self:
        if self.value_channels > 1 and self.compressor == "none":
            remedy = "use 'channel' or 'time', or one channel"
            raise ConfigError(problem("compressor", "none", f"given for value_channels={self.value_channels}", remedy))
        if self.value_channels == 1 and (self.compressor, self.expansion) != ("none", "repeat"):
            what, got = ("expansion", self.expansion) if self.compressor == "none" else ("compressor", self.compressor)
            allowed = "left out with value_channels=1"
            raise ConfigError(problem(what, got, allowed, "the authors use value_channels=4 with it"))
        if self.value_channels > 1 and self.blend != "none":
            raise ConfigError(problem("blend", self.blend, "'none' with several value channels", "use value_channels=1"))
        return self

    @property
    def parallel_streams(self) -> int:
        """The value channels."""
        return self.value_channels

    def write_only_form(self) -> Mapping[str, Any] | None:
        """The same without the erasure."""
        return {**self.to_data(), "update_rule": "write_only"} if self.update_rule == "delta" else None

    @property
    def init_equivalence(self) -> InitEquivalence:
        """None, but for a blend."""
        if self.blend == "annealed":
            return InitEquivalence("exact", "the blend starts at 0, where every write is the plain sum")
        return InitEquivalence("none", "it overwrites along the update's direction, so it is never the plain sum")

    def state(self, stack: Stack, index: int) -> tuple[Leaf, ...]:
        """The value channels, all of them the embedding at first unless that is convolved."""
        C, D = self.value_channels, stack.d_model
        if C == 1 or (index == 0 and self.expansion == "repeat"):
            return (stream(D, index),) * C
        return tuple(Leaf(f"channel {c} before {index}", Numbers(D)) for c in range(C))

    def flow(self, site: Site) -> Flow:
        """State, update and context make one new state; several channels are compressed first, and the target looks at that."""
        D, C = site.d_model, self.value_channels
        # The first sublayer finds the embedding in all channels.
        state = Numbers(D if site.index == 0 and self.expansion == "repeat" else C * D)
        write = Flow(read=state + Numbers(2 * D), written=Numbers(C * D), keeps_update=True)
        if self.compressor == "none":
            return write
        target = Numbers(0 if self.value_target == "paper" else D)
        return write + Flow(read=state + target, written=Numbers(D), views=Numbers(D))

    def ends_flow(self, stack: Stack) -> Flow:
        """The readout, and the convolution of the embeddings."""
        D, C = Numbers(stack.d_model), Numbers(self.value_channels * stack.d_model)
        if self.compressor == "none":
            return Flow()
        expansion = Flow(read=D, written=C, keeps_update=True) if self.expansion == "embedding_conv" else Flow()
        return expansion + Flow(read=C, written=D, views=D)

    def padding_bytes(self, site: Site, shape: Shape) -> int:
        """Behind a convolution, k - 1 tokens of each row."""
        return self._padding_bytes(site.d_model, shape) if self.compressor == "time" else 0

    def ends_padding_bytes(self, stack: Stack, shape: Shape) -> int:
        """The same behind the readout, and behind every channel of convolved embeddings."""
        convolutions = (self.compressor == "time") + self.value_channels * (self.expansion == "embedding_conv")
        return convolutions * self._padding_bytes(stack.d_model, shape)

    def _padding_bytes(self, D: int, shape: Shape) -> int:
        if shape.element_bytes < shape.statistics_bytes:
            # Sums are rounded to storage of their own.
            return 0
        return shape.batch * (self.kernel_size - 1) * D * shape.element_bytes

    def cost(self, site: Site, shape: Shape) -> Cost:
        """Gate and target by their weights, one write per channel, and the compressor, owned by the first of its block."""
        D, N, C = site.d_model, shape.total_tokens, self.value_channels
        gate = D + 1 if self.gate == "linear" else self.gate_width * D + self.gate_width + 1
        matmul = 2 * N * self.gate_width * D if self.gate == "two_layer" else 0
        gate_flops = 2 * D if self.gate == "linear" else 2 * self.gate_width
        target_flops = 2 * D if C == 1 else 0
        write_flops = 2 * D + (4 if self.update_rule == "delta" else 2) * D * C
        added = self._compressor_cost(D, shape, params=site.opens_block)
        added += Cost() if self.blend == "none" else blend_cost(shape, D)
        return added + Cost(
            params=gate + C * D + (0 if self.value_target == "paper" else C),
            matmul_flops=matmul + (2 * N * C * D if C > 1 else 0),
            elementwise_flops=N * (gate_flops + target_flops + write_flops),
            saved_bytes=self._saved_bytes(D, shape),
        )

    def ends_cost(self, stack: Stack, shape: Shape) -> Cost:
        """The readout, and the convolution of the embeddings."""
        D, C, k = stack.d_model, self.value_channels, self.kernel_size
        expansion = Cost()
        if self.expansion == "embedding_conv":
            flops, cached = 2 * k * shape.total_tokens * C * D, self._history_bytes(D, shape)
            expansion = Cost(params=C * D * k, elementwise_flops=flops, cache_bytes=cached)
        return expansion + self._compressor_cost(D, shape)

    def _compressor_cost(self, D: int, shape: Shape, params: bool = True) -> Cost:
        C, k, N, number = self.value_channels, self.kernel_size, shape.total_tokens, max(4, shape.element_bytes)
        widened = shape.element_bytes < 4
        if self.compressor == "time":
            return Cost(
                params=C * (D * k + 1) * params,
                elementwise_flops=2 * C * k * N * D,
                saved_bytes=(C * D * k * (1 + widened) + C * widened) * number,
                cache_bytes=C * self._history_bytes(D, shape),
            )
        if self.compressor == "channel":
            return Cost(
                params=C * (D + 1) * params,
                matmul_flops=2 * C * C * D,
                elementwise_flops=2 * C * N * D,
                saved_bytes=C * (C + D * (1 + widened)) * number,
            )
        return Cost()

    def _history_bytes(self, D: int, shape: Shape) -> int:
        return shape.batch * min(shape.tokens, self.kernel_size - 1) * D * shape.element_bytes

    def _saved_bytes(self, D: int, shape: Shape) -> int:
        """A few numbers per token in the statistics precision; a narrower model also widens what the hidden layer reads."""
        hidden = self.gate_width if self.gate == "two_layer" else 0
        by_channel = self.value_channels * (3 if self.value_target == "code" else 2)
        numbers = shape.total_tokens * (3 + by_channel + hidden)
        if hidden and shape.element_bytes < 4:
            numbers += (shape.total_tokens + hidden) * D
        return numbers * max(4, shape.element_bytes)

    def build(self, site: Site) -> "DeepDelta":
        """Builds the mixer, with a compressor of its own."""
        return DeepDelta(self, site.d_model)

    def build_block(self, sites: Sequence[Site], ends: DepthEnds) -> "list[DepthMixer]":
        """Builds the mixers of one block, which share the compressor of the first."""
        first = self.build(sites[0])
        return [first, *(DeepDelta(self, site.d_model, first.compress) for site in sites[1:])]

    def build_ends(self, stack: Stack) -> DepthEnds:
        """Builds the ends."""
        return StreamEnds() if self.value_channels == 1 else ChannelEnds(self, stack.d_model)

    def build_compressor(self, d_model: int) -> "Compressor | None":
        """Builds one compressor; there is none to build for a single channel."""
        kinds = {"none": None, "time": TimeCompressor, "channel": ChannelCompressor}
        kind = kinds[self.compressor]
        return None if kind is None else kind(self, d_model)


Channels = tuple[Float[Tensor, "B T D"], ...]
"""The depth state with several value channels."""

Histories = tuple[Float[Tensor, "B _ D"], ...]
"""The last tokens of every channel, or nothing before the first call."""


class Compressor(DeclaredModule, ABC):
    """Makes one input of all channels."""

    @abstractmethod
    def forward(self, state: Channels, layout: TokenLayout | None = None, cache: Any = None) -> tuple[Tensor, Any]:
        """Returns the input and the next cache; without a layout every row is one document."""

    def new_cache(self) -> Any:
        """What it carries from token to token before the first one."""


class TimeCompressor(Compressor):
    """A causal convolution of every channel along positions, then the sum of the channels by `read_weight`."""

    def __init__(self, config: DeepDeltaConfig, d_model: int) -> None:
        super().__init__()
        C, k = config.value_channels, config.kernel_size
        self.impl: Impl = config.impl
        self.weight = self.parameter("weight", (d_model, C, k), Normal(matrix_std(d_model)), "mixing")
        self.read_weight = self.parameter("read_weight", (C,), Constant(1 / C), "mixing")

    def new_cache(self) -> Histories:
        """No tokens."""
        return ()

    def forward(
        self, state: Channels, layout: TokenLayout | None = None, cache: Histories | None = None
    ) -> tuple[Float[Tensor, "B T D"], Histories | None]:
        """Returns the input, and the last k - 1 tokens of every channel when given those before."""
        dtype, kernel = statistics_dtype(state[0]), self.weight.shape[-1]
        weights = (self.weight.to(dtype) * self.read_weight.to(dtype)[:, None]).transpose(0, 1)
        past = cache[0].shape[1] if cache else 0
        documents = None if layout is None else layout.key_documents(past + state[0].shape[1])
        x = causal_conv_sum(state, weights, histories=cache or None, documents=documents, impl=self.impl)
        if cache is None:
            return x, None
        before = cache or (None,) * len(state)
        return x, tuple(next_history(history, channel, kernel) for history, channel in zip(before, state, strict=True))


class ChannelCompressor(Compressor):
    """A convolution along the channels of every feature, then the sum of the results by `read_weight`."""

    def __init__(self, config: DeepDeltaConfig, d_model: int) -> None:
        super().__init__()
        C = config.value_channels
        self.impl: Impl = config.impl
        self.weight = self.parameter("weight", (d_model, C), Normal(matrix_std(d_model)), "mixing")
        self.read_weight = self.parameter("read_weight", (C,), Constant(1 / C), "mixing")

    def forward(
        self, state: Channels, layout: TokenLayout | None = None, cache: None = None
    ) -> tuple[Float[Tensor, "B T D"], None]:
        """Returns the input; nothing is carried from token to token."""
        weights = _channel_weights(self.weight, self.read_weight, statistics_dtype(state[0]))
        return mix(state, weights.unsqueeze(0), self.impl)[0], None


@outside_autocast
def _channel_weights(weight: Float[Tensor, "D C"], read: Float[Tensor, " C"], dtype: torch.dtype) -> Float[Tensor, "C D"]:
    """The weight of each channel in the read: convolution and sum as one product."""
    C = read.shape[0]
    # Row j holds the read weight of each tap: tap m of the result r = j - m + (C-1)//2 sees channel j.
    reversed_read = pad(read.to(dtype).flip(0), (C, C))
    first = [2 * C - 1 - j - (C - 1) // 2 for j in range(C)]
    taps = torch.stack([reversed_read[start : start + C] for start in first])
    return taps @ weight.to(dtype).T


class DeepDelta(DepthMixer):
    """See `DeepDeltaConfig`; usable outside our decoder.

    Example:
        >>> from twoaxis.core.parameters import initialise
        >>> mixer = DeepDelta(DeepDeltaConfig(), d_model=4)
        >>> initialise(mixer, seed=0)
        >>> x, update = torch.ones(1, 1, 4), torch.tensor([[[1.0, 0.0, 0.0, 0.0]]])
        >>> mixer.write(x, update, context=x, carry=None)[..., 1:].tolist()
        [[[1.0, 1.0, 1.0]]]
    """

    def __init__(self, config: DeepDeltaConfig, d_model: int, shared: Compressor | None = None) -> None:
        super().__init__()
        self.config = config
        C, std = config.value_channels, matrix_std(d_model)
        self.gate = Gate(config, d_model)
        self.target_weight = self.parameter("target_weight", (d_model,) if C == 1 else (C, d_model), Normal(std), "gate")
        if config.value_target != "paper":
            self.target_bias = self.parameter("target_bias", (C,), Constant(0.0), "bias")
        self.blend = blend_parameter(self) if config.blend == "annealed" else None
        self.compressor = config.build_compressor(d_model) if shared is None else None
        # In a tuple, a module stays with the sublayer that lends it.
        self._shared = (shared,)

    @property
    def compress(self) -> Compressor | None:
        """What makes one input of several channels, its own or that of the block."""
        return self.compressor if self._shared[0] is None else self._shared[0]

    def new_cache(self) -> Any:
        """The history of the compressor's input at this sublayer."""
        return None if self.compress is None else self.compress.new_cache()

    def read(self, state: Any) -> tuple[Float[Tensor, "B T D"], Any]:
        """Returns the stream, or what the channels are compressed to, also as the carry."""
        if self.compress is None:
            return state, None
        x, _ = self.compress(state)
        return x, x

    def read_along(self, state: Any, layout: TokenLayout, cache: Any) -> tuple[Float[Tensor, "B T D"], Any, Any]:
        """As `read`, with the tokens of the same document before these."""
        if self.compress is None:
            return state, None, None
        x, cache = self.compress(state, layout, cache)
        return x, x, cache

    def write(self, state: Any, update: Float[Tensor, "B T D"], context: Views, carry: Any) -> Any:
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

    def write_gauges(self, state: Any, update: Tensor, context: Views, carry: Any) -> dict[str, Float[Tensor, "B T"]]:
        """The gate beta, and how far the component k^T X is from its target before and after the write, over all channels."""
        assert isinstance(context, Tensor), "the read returns one view, so the context is one tensor"
        channels = (state,) if carry is None else state
        target = self.target(state if carry is None else carry, context)
        written = self.write(state, update, context, carry)
        targets = target.unsqueeze(0) if carry is None else target
        eps = self.config.direction_eps

        def discrepancy(of: Channels) -> Float[Tensor, "B T"]:
            return torch.linalg.vector_norm(components(of, update, eps) - targets, dim=0)

        after = (written,) if carry is None else written
        return {"beta": self.gate(context), "before": discrepancy(channels), "after": discrepancy(after)}

    def target(
        self, x: Float[Tensor, "B T D"], context: Float[Tensor, "B T D"]
    ) -> Float[Tensor, "B T"] | Float[Tensor, "C B T"]:
        """The value that replaces the component of the stream, or of each channel."""
        product = row_product if self.target_weight.ndim == 1 else linear_scores
        if self.config.value_target == "paper":
            return product(context, self.target_weight, self.config.impl)
        linear = product(x, self.target_weight, self.config.impl)
        linear = linear + self.target_bias.view(-1, *(1,) * (linear.ndim - 1))
        return TARGET_SCALE * torch.sigmoid(linear) if self.config.value_target == "code" else linear


class Gate(DeclaredModule):
    """How far the component moves: beta = 2 sigmoid(g(c)) in (0, 2)."""

    def __init__(self, config: DeepDeltaConfig, d_model: int) -> None:
        super().__init__()
        start = config.beta_init / 2
        self.two_layer = config.gate == "two_layer"
        self.impl: Impl = config.impl
        width = config.gate_width if self.two_layer else d_model
        if self.two_layer:
            self.hidden_weight = self.parameter("hidden_weight", (width, d_model), Normal(matrix_std(d_model)), "gate")
        self.weight = self.parameter("weight", (width,), Normal(matrix_std(width)), "gate")
        self.bias = self.parameter("bias", (1,), Constant(math.log(start / (1 - start))), "bias")

    def forward(self, context: Float[Tensor, "B T D"]) -> Float[Tensor, "B T"]:
        """Returns beta for each token."""
        if self.two_layer:
            context = _hidden(context, self.hidden_weight)
        return 2 * torch.sigmoid(row_product(context, self.weight, self.impl) + self.bias)


@outside_autocast
def _hidden(x: Tensor, weight: Tensor) -> Tensor:
    dtype = statistics_dtype(x)
    return torch.tanh(x.to(dtype) @ weight.to(dtype).T)


class EndsCache(NamedTuple):
    """What the ends carry from token to token: embeddings, and the channels that the readout sees."""

    embeddings: Float[Tensor, "B _ D"] | None
    readout: Any


class ChannelEnds(DepthEnds):
    """The embedding becomes all channels, and a compressor of its own reads them out."""

    def __init__(self, config: DeepDeltaConfig, d_model: int) -> None:
        super().__init__()
        self.config = config
        C, k = config.value_channels, config.kernel_size
        self.readout = cast(Compressor, config.build_compressor(d_model))
        self.convolves = config.expansion == "embedding_conv"
        if self.convolves:
            last_tap = Values((*(0.0,) * (k - 1), 1.0) * (d_model * C))
            self.embedding_weight = self.parameter("embedding_weight", (d_model, C, k), last_tap, "mixing")

    def new_cache(self) -> EndsCache | None:
        """No tokens; None where nothing mixes along positions."""
        readout = self.readout.new_cache()
        return EndsCache(None, readout) if self.convolves or readout is not None else None

    def enter(self, embeddings: Float[Tensor, "B T D"]) -> Channels:
        """Returns the channels."""
        return self._expand(embeddings, None, None)

    def enter_along(
        self, embeddings: Float[Tensor, "B T D"], layout: TokenLayout, cache: EndsCache | None
    ) -> tuple[Channels, EndsCache | None]:
        """As `enter`, with the tokens of the same document before these."""
        if not self.convolves:
            return self._expand(embeddings, None, None), cache
        history = None if cache is None else cache.embeddings
        past = 0 if history is None else history.shape[1]
        channels = self._expand(embeddings, history, layout.key_documents(past + embeddings.shape[1]))
        if cache is None:
            return channels, None
        return channels, cache._replace(embeddings=next_history(history, embeddings, self.config.kernel_size))

    def _expand(self, embeddings: Tensor, history: Tensor | None, documents: Tensor | None) -> Channels:
        if not self.convolves:
            return (embeddings,) * self.config.value_channels
        return tuple(
            causal_conv(embeddings, weight, history=history, documents=documents, impl=self.config.impl)
            for weight in self.embedding_weight.unbind(1)
        )

    def leave(self, state: Channels) -> Float[Tensor, "B T D"]:
        """Returns what the channels are compressed to."""
        return self.readout(state)[0]

    def leave_along(
        self, state: Channels, layout: TokenLayout, cache: EndsCache | None
    ) -> tuple[Float[Tensor, "B T D"], EndsCache | None]:
        """As `leave`, with the tokens of the same document before these."""
        left, readout = self.readout(state, layout, None if cache is None else cache.readout)
        return left, None if cache is None else cache._replace(readout=readout)
