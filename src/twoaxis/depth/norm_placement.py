"""Norm placement: where norms stand around a sublayer and the residual stream, and what they multiply.

Letters: B batch, T position, D width, L blocks, N sublayers, b block and s sublayer, counted from 0.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple, Self

from pydantic import Field, model_validator
from torch import Tensor, add

from twoaxis.core.cost import Cost, Shape
from twoaxis.core.design import InitEquivalence, MixingDesign
from twoaxis.core.errors import ConfigError, problem
from twoaxis.core.parameters import Constant
from twoaxis.core.position import LayerStack, SublayerInfo, SublayerPosition
from twoaxis.core.views import Views
from twoaxis.depth.base import DepthConfig, DepthMixer, Layout, Stream, StreamEnds
from twoaxis.ops.blend import annealed, blend_cost, blend_parameter
from twoaxis.ops.norm import layer_norm, rms_norm
from twoaxis.ops.precision import Impl

Placement = Literal["pre", "post", "sandwich", "layer_scaling", "deepnorm", "keel", "reordered", "mix"]


class Form(NamedTuple):
    """What one sublayer does.

    Attributes:
        before: factor on the norm before it; None without that norm.
        after: what the norm of the mixer acts on: the update, its sum with the stream, or nothing.
        stream: alpha, the factor on the stream in that sum.
    """

    before: float | None
    after: Literal["none", "update", "sum"]
    stream: float = 1.0


class NormPlacementConfig(DepthConfig):
    """Keeps one stream, and places norms before a sublayer, behind it or behind the sum.

    Equation: pre            x' = x + f(Norm(x))
              post           x' = Norm'(x + f(x))
              sandwich       x' = x + Norm'(f(Norm(x)))
              layer_scaling  x' = x + f(Norm(x) / sqrt(b + 1))
              deepnorm       x' = LayerNorm'(alpha x + f(x)),  alpha = N^(1/4)
              keel           x' = Norm'(alpha x + f(Norm(x))),  alpha = N (s = 0: x + f(Norm(x));  s = 1: alpha = 1)
              reordered      x' = x + Norm'(f(x))
              mix            post in the first P blocks, then pre
              Norm' belongs to the mixer: an RMSNorm with a gain; LayerNorm' has a gain and a bias
    Source:   post and pre: arXiv:2002.04745, figure 1; sandwich: Peri-LN, arXiv:2502.02732; layer_scaling: arXiv:2502.05795
              (LNS); deepnorm: arXiv:2203.00555, figure 2; keel: arXiv:2601.19895; reordered: OLMo 2, arXiv:2501.00656; mix:
              Mix-LN, arXiv:2412.13795, and its code pixeli99/MixLN@ff45826. One code for all but mix:
              keyu-wang-2002/DepthBench, nn/transformer/block.py
    Deviates: N counts sublayers, 2 L in the papers, whose blocks have two. The final RMSNorm of the decoder stays; DepthBench
              has it too, in every form. Peri-LN also normalises the embedding: set embedding_norm="rms" of the model. The
              code of Mix-LN reads P from the environment, by default 1, where the paper has a quarter of the blocks
    Shapes:   state [B T D]; update [B T D] -> state [B T D]; statistics in float32, rounded once
    Init:     EXACT for pre, for mix without post blocks, and with blend="annealed"; else NONE. Gains start at 1, biases at 0.
              deepnorm multiplies the initial matrices of values, outputs and feed-forwards by (4 N)^(-1/4), in place of the
              usual 1 / sqrt(2 L) of outputs. layer_scaling leaves outputs unscaled: its authors found it worse with outputs
              scaled by depth, so that combination is refused. Weights of a model of another code base are the host's. A trained
              pre-norm model becomes layer_scaling exactly: `twoaxis retrofit` multiplies its gains by sqrt(b + 1)
    Cost:     params D per norm of the mixer (deepnorm 2*D); flops 4*D per token and norm (deepnorm 8*D), D per add and per
              factor; state D numbers per token. A norm of the sum saves it for the backward pass
    Published: DepthBench, arXiv:2609.32534, 400M parameters and 8B tokens, peak rates from a sweep of 5e-4, 1e-3, 2e-3 and
              5e-3: best 2e-3, but 1e-3 for deepnorm and 1e-2, outside of the sweep, for layer_scaling. Its scripts train
              deepnorm with 2e-3. One seed, equal tokens; norm placements gain little and lose at extreme depth. Sweep anew.
              In our study `depthbench` two forms do not beat a count bigram. deepnorm makes all tokens one vector at rates of
              2.5e-3 to 4e-2 and not at 1e-3; sandwich drowns embeddings of length 1 in updates of length sqrt(D): at rate 1e-2,
              400k tokens end at 5.11 nats, with embedding_norm="rms" at 4.35 (one run each; pre 4.38)

    Args:
        placement: one of the above.
        post_blocks: P of `mix`: a whole number of blocks, or a fraction of them below 1, rounded down to one at least.
        layer_eps: eps of LayerNorm' in `deepnorm`.
        output_init: standard deviation of initial output matrices: `scaled` by 1 / sqrt(2 L), or `plain`, as of any other
            matrix, which `layer_scaling` has without being asked.
        blend: `none`, or `annealed`: from pre-norm to the placement with a weight g from 0 on, by a recipe or learned; the norm
            before a sublayer that the placement lacks is blended out too: (1 - g) Norm(x) + g x.
        impl: `fused` or `reference`.

    Raises:
        ConfigError: more post_blocks than blocks, an option that the placement does not read, a scaled output with
            `layer_scaling`, or a blend where a plain model fits without.

    Example:
        >>> NormPlacementConfig(placement="mix", post_blocks=0.25).init_equivalence.relation
        'none'
    """

    kind: Literal["norm_placement"] = "norm_placement"
    placement: Placement = "sandwich"
    post_blocks: int | float = Field(default=0.25, ge=0)
    layer_eps: float = Field(default=1e-5, gt=0)
    output_init: Literal["scaled", "plain"] = "scaled"
    blend: Literal["none", "annealed"] = "none"
    impl: Impl = "fused"

    @model_validator(mode="before")
    @classmethod
    def _plain_outputs(cls, data: Any) -> Any:
        scaling = isinstance(data, Mapping) and data.get("placement") == "layer_scaling"
        return {"output_init": "plain", **data} if scaling else data

    @model_validator(mode="after")
    def _options_fit(self) -> Self:
        placement, given = self.placement, f", which placement={self.placement!r} does not read"
        if placement != "mix":
            self.refuse_options(("post_blocks",), given, "remove it, or use placement='mix'")
        elif isinstance(self.post_blocks, float) and self.post_blocks >= 1:
            allowed = "a whole number of blocks, or a fraction below 1"
            raise ConfigError(
                problem("post_blocks", self.post_blocks, allowed, "write the number of blocks, or use placement='post'")
            )
        if placement != "deepnorm":
            self.refuse_options(("layer_eps",), given, "remove it, or use placement='deepnorm'")
        if self.blend != "none" and (self._is_plain or placement == "layer_scaling"):
            allowed = f"'none' with placement={placement!r}, which takes over a plain model as it is"
            raise ConfigError(problem("blend", self.blend, allowed, "leave it out"))
        if placement == "deepnorm" or self.blend != "none":
            reason = " with placement='deepnorm' and with a blend, which have initial values of their own"
            self.refuse_options(("output_init",), reason, "remove it")
        if placement == "layer_scaling" and self.output_init == "scaled":
            allowed = "'plain' with placement='layer_scaling', which its authors found worse with outputs scaled by depth"
            raise ConfigError(problem("output_init", self.output_init, allowed, "leave it out"))
        return self

    @property
    def _is_plain(self) -> bool:
        return self.placement == "pre" or (self.placement == "mix" and self.post_blocks == 0)

    @property
    def design(self) -> MixingDesign:
        """Every source with weight 1, but for norms and constant factors."""
        if self._is_plain or self.placement == "layer_scaling":
            return MixingDesign("none", "none", "f_j, e", "none: weight 1", "own state", "none", "is the stream")
        of_update = self.placement in ("sandwich", "reordered")
        of_sum = "LayerNorm of the sum" if self.placement == "deepnorm" else "norm of the sum"
        value, norm = ("N(f_j), e", "norm of the update") if of_update else ("f_j, e", of_sum)
        return MixingDesign("none", "none", value, norm, "own state", "sublayer", "is the stream")

    @property
    def init_equivalence(self) -> InitEquivalence:
        """None, unless it is the plain model or a blend."""
        if self._is_plain:
            return InitEquivalence("exact", "it is the plain model")
        if self.blend == "annealed":
            return InitEquivalence("exact", "the blend starts at 0, where every read and write is that of the plain model")
        if self.placement == "layer_scaling":
            return InitEquivalence("none", "norms shrink with depth; gains times sqrt(b + 1) make it the plain model")
        return InitEquivalence("none", "the mixer normalises updates or the stream itself, which the plain model does not")

    def form(self, site: SublayerPosition) -> Form:
        """What the sublayer at this position of the whole model does."""
        n_sublayers = site.stack.n_sublayers
        post = Form(None, "sum")
        return {
            "pre": Form(1.0, "none"),
            "post": post,
            "sandwich": Form(1.0, "update"),
            "layer_scaling": Form(1 / math.sqrt(site.block + 1), "none"),
            "deepnorm": Form(None, "sum", n_sublayers**0.25),
            "keel": Form(1.0, "sum" if site.index else "none", float(n_sublayers) if site.index > 1 else 1.0),
            "reordered": Form(None, "update"),
            "mix": post if site.block < self.count_post_blocks(site.stack) else Form(1.0, "none"),
        }[self.placement]

    def count_post_blocks(self, stack: LayerStack) -> int:
        """P of `mix`."""
        if isinstance(self.post_blocks, int):
            return self.post_blocks
        return max(1, math.floor(self.post_blocks * stack.n_blocks))

    def prepare(self, stack: LayerStack) -> LayerStack:
        """Returns the stack with the norms before its sublayers and the scale of their initial matrices."""
        if self.count_post_blocks(stack) > stack.n_blocks:
            allowed = f"at most the {stack.n_blocks} blocks of the model"
            raise ConfigError(problem("post_blocks", self.post_blocks, allowed, "give a fraction, such as 0.25"))
        return super().prepare(stack).with_slots(self._slot)

    def _slot(self, site: SublayerPosition) -> SublayerInfo:
        before = self.form(site).before
        slot = replace(site.slot, norm="rms" if before is not None else "none", norm_scale=before or 1.0)
        if self.placement == "deepnorm" and self.blend == "none":
            beta = (4 * site.stack.n_sublayers) ** -0.25
            return replace(slot, output_scale=beta, hidden_scale=beta)
        return replace(slot, output_scale=1.0) if self.output_init == "plain" else slot

    def cost(self, site: SublayerPosition, shape: Shape) -> Cost:
        """The norm of the mixer, the add, and a blend of both ways."""
        D, tokens, form = site.d_model, shape.total_tokens, self.form(site)
        params, flops = (0, 0) if form.after == "none" else (2, 8) if self.placement == "deepnorm" else (1, 4)
        cost = Cost(params=params * D, elementwise_flops=tokens * D * (flops + 1 + (form.stream != 1)))
        if self.blend == "none" or form.after == "none":
            return cost
        read = Cost(params=D, elementwise_flops=7 * tokens * D) if form.before is None else Cost()
        return cost + blend_cost(shape, D) + read

    def build(self, stack: LayerStack) -> "tuple[list[NormPlacement], StreamEnds]":
        """Builds a mixer for each sublayer, with its norm where it has one."""
        return [NormPlacement(self, site) for site in stack.sites], StreamEnds()


class NormPlacement(DepthMixer, config=NormPlacementConfig):
    """See `NormPlacementConfig`; usable outside our decoder.

    Example:
        >>> import torch
        >>> post = NormPlacement(d_model=2, placement="post")
        >>> post(torch.tensor([[[1.0, 3.0]]]), norm=lambda x: 0 * x, sublayer=lambda x: 6 * x).detach()
        tensor([[[0.4472, 1.3416]]])
    """

    def __init__(self, config: NormPlacementConfig, site: SublayerPosition) -> None:
        super().__init__()
        self.form = config.form(site)
        self.impl: Impl = config.impl
        self.eps = config.layer_eps if config.placement == "deepnorm" else site.norm_eps
        self.read_eps = site.norm_eps
        # An update has lost its scale when it is normalised.
        self.update_scale = site.stack.update_scale if self.form.after == "update" else 1.0
        normed = self.form.after != "none"
        blended, width = normed and config.blend == "annealed", (site.d_model,)
        self.gain = self.parameter("gain", width, Constant(1.0), "norm") if normed else None
        self.bias = self.parameter("bias", width, Constant(0.0), "norm") if config.placement == "deepnorm" else None
        self.blend = blend_parameter(self) if blended else None
        unread = blended and self.form.before is None
        self.input_gain = self.parameter("input_gain", width, Constant(1.0), "norm") if unread else None

    def read(self, state: Stream, layout: Layout = None, cache: Any = None) -> tuple[Stream, None, Any]:
        """Returns the stream, or its blend with the norm that the placement lacks."""
        if self.input_gain is None or self.blend is None:
            return state, None, cache
        return annealed(rms_norm(state, self.input_gain, self.read_eps, self.impl), state, self.blend), None, cache

    def write(self, state: Stream, update: Stream, context: Views, carry: Any) -> Stream:
        """Returns the next stream."""
        if self.gain is None:
            return state + update
        if self.form.after == "update":
            written = state + self._norm(update)
        else:
            written = self._norm(add(update, state, alpha=self.form.stream))
        return written if self.blend is None else annealed(state + update, written, self.blend)

    def _norm(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return rms_norm(x, self.gain, self.eps, self.impl, self.update_scale)
        return layer_norm(x, self.eps, self.impl, self.gain, self.bias)
