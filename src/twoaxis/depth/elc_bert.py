"""ELC-BERT: each block reads a learned convex combination of the embedding and the outputs of all blocks before it.

Letters: B batch, T position, D width, n sources of one block.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from twoaxis.core.cost import Cost, Shape
from twoaxis.core.design import InitEquivalence, MixingDesign
from twoaxis.core.errors import ConfigError, problem
from twoaxis.core.position import LayerStack, SublayerPosition
from twoaxis.core.views import Views, unit_name
from twoaxis.depth.base import DepthConfig, DepthMixer, Explanation, Layout, Read, Stream, Write
from twoaxis.depth.history import Combination, History, HistoryEnds
from twoaxis.ops.norm import layer_norm
from twoaxis.ops.precision import Impl

Variant = Literal["base", "zero", "normalized", "weighted_output"]


class ElcBertConfig(DepthConfig):
    """Feeds each block a softmax-weighted sum of earlier block outputs, which themselves contain no residual stream.

    Equation: U_n = sum_{i<n} softmax(w_n)_i H_i,  w_n parameters: no token changes a weight in any variant
              H_0 = embeddings (embedding_norm `layer`: LayerNorm(embeddings) without gain or bias)
              A_s = A_{s-1} + f_s(U_n + A_{s-1}), A_0 = 0, over the sublayers s of block n (base: f_s(A_{s-1}) after the first)
              H_n = A (normalized: LayerNorm(A) without gain or bias);  the model returns H_L
              (weighted_output: sum_{i<=L} softmax(v)_i H_i)
    Source:   Not all layers are equally as important, arXiv:2311.02265, section 3 and the variants of its ablation; authors'
              code ltgoslo/elc-bert, models/model_elc_bert_{base,zero,normalized,weighted_output}.py
    Deviates: the authors' model gives every variant H_0 = LayerNorm(embeddings), without gain or bias; here `normalized` does,
              whose other sources have that scale too, and an embedding of std 0.02 would have 2 % of their weight in each sum.
              The other variants take the embedding as it is: a decoder with pre-norm bounds no output, so that no one scale is
              right; for the authors' H_0 say embedding_norm="layer". That norm needs no option of the model; the model's own
              embedding_norm, an RMSNorm, differs by the mean and a gain. Their attention ends in an affine LayerNorm, which is
              part of their model, as are its scaled initial feed-forwards. No logit decays. The first block has one
              source, so its logit would be dead: it does not exist here. Blocks may have any number of sublayers
    Shapes:   state (n times [B T D], and inside a block A and U); softmax, sum and LayerNorm in float32, rounded once
    Init:     NONE: a convex sum is a mean, not the residual sum, and the head sees the last block alone. Logits start at 0
              (base: the newest at 1, whose weight is then e / (e + n - 1): a mild bias, not an identity). EXACT with
              blend="annealed": weights 1 + g (softmax(w) - 1) add up the plain stream at g = 0
    Cost:     params n in block n, L (L + 1) / 2 - 1 in all (weighted_output: L + 1 more); flops 2*n*D per token and block;
              state at most (L + 2)*D numbers per token
    Published: BabyLM 2023, 10M words, arXiv:2311.02265 table 1: BLiMP 75.8, GLUE 73.7, MSGS 29.4 (best of the track). Its
              ablation at base size, which we know from summaries only: BLiMP 85.3 ("plain", which we take for base), 84.9
              (zero), 85.1 (normalized), 86.1 (weighted_output). All with an affine LayerNorm after attention, which bounds
              the outputs; our decoder has none, so prefer `normalized` there

    Args:
        variant: `base`, `zero`, `normalized` or `weighted_output`, as the authors name their files.
        embedding_norm: `layer` normalises H_0, `none` does not; None is `layer` for `normalized`, else `none`.
        source_eps: eps of these LayerNorms.
        blend: `none`, or `annealed` (`weighted_output` only): a weight g from 0 on interpolates from plain sums to convex ones,
            scheduled by a recipe or learned.
        impl: `fused` or `reference`.

    Raises:
        ConfigError: a blend of another variant, a blend after a norm of the embedding, where the plain stream is not summed, or
            a source_eps without a LayerNorm.

    Example:
        >>> ElcBertConfig(variant="base").init_equivalence.relation
        'none'
    """

    unrecorded: ClassVar[Mapping[str, Any]] = {"embedding_norm": "none"}

    kind: Literal["elc_bert"] = "elc_bert"
    variant: Variant = "base"
    embedding_norm: Literal["none", "layer"] | None = None
    source_eps: float = Field(default=1e-7, gt=0)
    blend: Literal["none", "annealed"] = "none"
    impl: Impl = "fused"

    @property
    def design(self) -> MixingDesign:
        """A softmax over parameters."""
        value = "LayerNorm(D_j), e" if self.variant == "normalized" else "D_j, e"
        return MixingDesign("none", "none", value, "softmax", "all", "block", "replaces the stream")

    @model_validator(mode="after")
    def _options_fit(self) -> Self:
        if self.variant != "normalized" and not self.norms_embedding:
            reason, remedy = (
                f", since variant={self.variant!r} has no LayerNorm here",
                "remove it, or use embedding_norm='layer'",
            )
            self.refuse_options(("source_eps",), reason, remedy)
        if self.blend == "annealed" and self.variant != "weighted_output":
            allowed = "'weighted_output' with blend='annealed'"
            raise ConfigError(problem("variant", self.variant, allowed, "use that variant"))
        if self.blend == "annealed" and self.norms_embedding:
            allowed = "'none' with blend='annealed', which starts at the plain sum"
            raise ConfigError(problem("embedding_norm", self.embedding_norm, allowed, "leave it out"))
        return self

    @property
    def norms_embedding(self) -> bool:
        """Whether the first source is the LayerNorm of the embedding."""
        return (self.embedding_norm or ("layer" if self.variant == "normalized" else "none")) == "layer"

    @property
    def init_equivalence(self) -> InitEquivalence:
        """None; exact with a blend."""
        if self.blend == "annealed":
            return InitEquivalence("exact", "the blend starts at 0, where every read is the plain sum of all outputs")
        return InitEquivalence("none", "blocks read a mean of earlier outputs, and the head sees no sum of them")

    def cost(self, site: SublayerPosition, shape: Shape) -> Cost:
        """The combination where a block opens, one or two adds elsewhere, and the norm where a block of `normalized` closes."""
        width = shape.total_tokens * site.d_model
        cost = Cost(elementwise_flops=width * (1 if self.variant == "base" else 2))
        if site.opens_block:
            cost = self._mixture_cost(site.block + 1, site.stack, shape)
        return cost + Cost(elementwise_flops=6 * width * (self.variant == "normalized" and site.closes_block))

    def ends_cost(self, stack: LayerStack, shape: Shape) -> Cost:
        """The norm of the embedding and the final combination, where there are any."""
        norm = Cost(elementwise_flops=6 * shape.total_tokens * stack.d_model * self.norms_embedding)
        return norm + (self._mixture_cost(stack.n_blocks + 1, stack, shape) if self.variant == "weighted_output" else Cost())

    def combination(self, n_sources: int, stack: LayerStack) -> Combination:
        """Builds one convex sum."""
        scale = stack.update_scale if self.variant == "normalized" else 1.0
        return Combination(n_sources, float(self.variant == "base"), self.blend == "annealed", scale)

    def _mixture_cost(self, n: int, stack: LayerStack, shape: Shape) -> Cost:
        if n == 1:
            return Cost()
        return Cost(params=n + (self.blend != "none"), elementwise_flops=2 * n * shape.total_tokens * stack.d_model)

    def build(self, stack: LayerStack) -> "tuple[list[ElcBert], ElcBertEnds]":
        """Builds a combination for each block but the first, and for the head where it has one."""
        return [ElcBert(self, site) for site in stack.sites], ElcBertEnds(self, stack)


class ElcBert(DepthMixer, config=ElcBertConfig):
    """See `ElcBertConfig`; sources are the embedding and the outputs of earlier blocks, as long as they are read again."""

    def __init__(self, config: ElcBertConfig, site: SublayerPosition) -> None:
        super().__init__()
        self.config = config
        self.keeps_sources = config.variant == "weighted_output" or site.block + 1 < site.stack.n_blocks
        self.opens_block, self.closes_block = site.opens_block, site.closes_block
        self.combination = config.combination(site.block + 1, site.stack) if site.opens_block and site.block else None

    def read(self, state: History, layout: Layout = None, cache: Any = None) -> tuple[Stream, tuple[Stream, ...], Any]:
        """Returns the combination, or inside a block its input plus the updates so far; carries the input of the block."""
        if self.opens_block:
            combined = state.sources[0] if self.combination is None else self.combination(state.sources)
            return combined, (combined,), cache
        added, *block_input = state.inside
        return block_input[0] + added if block_input else added, tuple(block_input), cache

    def write(self, state: History, update: Stream, context: Views, carry: tuple[Stream, ...]) -> History:
        """Returns the state with the update added, as a new output when it closes the block."""
        sources, added = state.sources if self.keeps_sources else (), state.added(update)
        if not self.closes_block:
            return History(sources, (added,) if self.config.variant == "base" else (added, *carry))
        if self.config.variant == "normalized":
            added = layer_norm(added, self.config.source_eps, self.config.impl)
        return History((*sources, added))

    def explain(self, done: Read | Write) -> Explanation:
        """Returns the combination, where a block after the first one opens."""
        if isinstance(done, Write) or self.combination is None:
            return Explanation()
        return self.combination.explain(done.state, done.views, _names(done.state))


def _names(state: History) -> tuple[str, ...]:
    return tuple(map(unit_name, range(len(state.sources))))


class ElcBertEnds(HistoryEnds):
    """The embedding is the first output; the model returns the last one, or a combination of all of them."""

    def __init__(self, config: ElcBertConfig, stack: LayerStack) -> None:
        super().__init__()
        self.config = config
        self.combination = config.combination(stack.n_blocks + 1, stack) if config.variant == "weighted_output" else None

    def enter(self, embeddings: Stream, layout: Layout = None, cache: Any = None) -> tuple[History, Any]:
        """Returns the embedding, or its norm, as the only output."""
        config = self.config
        first = layer_norm(embeddings, config.source_eps, config.impl) if config.norms_embedding else embeddings
        return History((first,)), cache

    def leave(self, state: History, layout: Layout = None, cache: Any = None) -> tuple[Stream, Any]:
        """Returns the last output, or the final combination."""
        return state.sources[-1] if self.combination is None else self.combination(state.sources), cache

    def explain(self, done: Read) -> Explanation:
        """Returns the final combination, if any."""
        if self.combination is None:
            return Explanation()
        return self.combination.explain(done.state, done.views, _names(done.state))
