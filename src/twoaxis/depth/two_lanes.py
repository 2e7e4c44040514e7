"""Two lanes: from one block on, attention reads one residual stream and the feed-forward another, and both write to both.

Letters: B batch, T position, D width, P the first block with two lanes.
"""

from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field

from twoaxis.core.cost import Cost, Shape
from twoaxis.core.design import InitEquivalence, MixingDesign
from twoaxis.core.errors import ConfigError, problem
from twoaxis.core.parameters import Constant, Values
from twoaxis.core.position import LayerStack, SublayerPosition
from twoaxis.core.views import Views, WeightedSum, per_token
from twoaxis.depth.base import Controls, DepthConfig, DepthEnds, DepthMixer, Explanation, Layout, Read, Stream, Write
from twoaxis.ops.mix import mix
from twoaxis.ops.norm import rms_norm
from twoaxis.ops.precision import Impl, statistics_dtype


class TwoLanesConfig(DepthConfig):
    """Splits the residual stream into two lanes: the last sublayer of a block reads the second, the others the first.

    Equation: u = L_0, or L_1 before the last sublayer of a block;  y = f(Norm(u)), for those that read L_0 plus c_g x_0
              L_j' = a_g L_j + b_gj y,  j = 0, 1; before block P, L_1 = L_0 and b_g1 = b_g0
              h = (L_0 + L_1) / 2 - d K,  K = L_0 behind block `backout_block`,  x_0 = e / sqrt(mean(e^2) + eps)
    Source:   KellerJordan/modded-nanogpt at 699e93c8 (pull request 230), train_gpt.py, GPT.forward (no paper); replaced there
              by pull request 241
    Deviates: value embeddings, smear, bigrams and the skip of that model are not here. It starts at x_0 (`normalised_start`);
              by default the lanes start as the embedding, as in the plain model. eps is the epsilon of the statistics dtype
    Shapes:   state ([B T D], [B T D], x_0 [B T D], from block `backout_block` on also K [B T D]), before block P the first two
              are one tensor; update [B T D] -> state; sums in float32, lanes rounded once
    Init:     plain: a = b = 1, c = d = 0: EXACT with `normalised`, since the lanes are equal. released: a = sqrt(1.1), d = 0.5,
              and b_g1 = 1.5 for those that read L_0 from block P on: NONE
    Cost:     params 2 or 3 per sublayer, from block P on one more, and 1; flops 3*D or 5*D per token, sublayer and lane, and
              8*D per token for x_0 and h; state up to 4*D numbers per token
    Published: pull request 230: 45 steps and 0.85 s less in that speed run; its author found that static Hyper-Connections, of
              which the lanes are a case (2 streams, one-hot reads, R = a times the identity), cost time and gained nothing

    Args:
        first_block: P; None is two thirds of the blocks, 7 of 11 as released.
        backout_block: whose output K is; None is P.
        embedding: `normalised`: the lanes start as the embedding; or `normalised_start`: as x_0.
        init: `plain`, or `released`.
        impl: `fused` or `reference`.

    Raises:
        ConfigError: blocks that the model does not have.

    Example:
        >>> TwoLanesConfig().init_equivalence.relation
        'exact'
    """

    kind: Literal["two_lanes"] = "two_lanes"
    first_block: int | None = Field(default=None, ge=0)
    backout_block: int | None = Field(default=None, ge=0)
    embedding: Literal["normalised", "normalised_start"] = "normalised"
    init: Literal["plain", "released"] = "plain"
    impl: Impl = "fused"

    @property
    def design(self) -> MixingDesign:
        """Static weights of two streams that are never mixed."""
        return MixingDesign("none", "none", "S_j, RMSNorm(e)", "none", "own state, e, h_l", "sublayer", "written to 2 streams")

    def controls(self) -> Controls:
        """A wider plain stream."""
        return Controls(streams=2)

    @property
    def init_equivalence(self) -> InitEquivalence:
        """Exact, unless the lanes start as the normalised embedding or with the released weights."""
        if self.embedding == "normalised_start" or self.init == "released":
            return InitEquivalence("none", "the lanes start as the normalised embedding, or are scaled and partly taken off")
        return InitEquivalence("exact", "both lanes are the plain stream, and their mean is left")

    def blocks(self, stack: LayerStack) -> tuple[int, int]:
        """The first block with two lanes, and the block behind which lane 0 is kept for the end."""
        first = 2 * stack.n_blocks // 3 if self.first_block is None else self.first_block
        return first, first if self.backout_block is None else self.backout_block

    def prepare(self, stack: LayerStack) -> LayerStack:
        """Checks that the model has the blocks."""
        for name, block in zip(("first_block", "backout_block"), self.blocks(stack), strict=True):
            if block >= stack.n_blocks:
                allowed = f"below the {stack.n_blocks} blocks of the model"
                raise ConfigError(problem(name, block, allowed, "lower it, or leave it out"))
        return super().prepare(stack)

    def cost(self, site: SublayerPosition, shape: Shape) -> Cost:
        """The sums of one lane or of both."""
        lanes, injects = 1 + (site.block >= self.blocks(site.stack)[0]), not reads_second(site)
        flops = (3 + 2 * injects) * lanes * shape.total_tokens * site.d_model
        return Cost(params=1 + lanes + injects, elementwise_flops=flops)

    def ends_cost(self, stack: LayerStack, shape: Shape) -> Cost:
        """The norm of the embedding, and the last sum."""
        return Cost(params=1, elementwise_flops=8 * shape.total_tokens * stack.d_model)

    def build(self, stack: LayerStack) -> "tuple[list[TwoLanes], TwoLanesEnds]":
        """Builds the weights of each sublayer and of the last sum."""
        return [TwoLanes(self, site) for site in stack.sites], TwoLanesEnds(self)


class Lanes(NamedTuple):
    """The depth state: both lanes, the normalised embedding, and lane 0 behind the block that is taken off at the end."""

    first: Stream
    second: Stream
    embedding: Stream
    kept: tuple[Stream, ...] = ()


def reads_second(site: SublayerPosition) -> bool:
    """Whether a sublayer reads the second lane: the last one of a block of several, which is the feed-forward."""
    return site.closes_block and not site.opens_block


class TwoLanes(DepthMixer, config=TwoLanesConfig):
    """See `TwoLanesConfig`."""

    def __init__(self, config: TwoLanesConfig, site: SublayerPosition) -> None:
        super().__init__()
        self.config, self.reads_second = config, reads_second(site)
        first, backout = config.blocks(site.stack)
        self.parts, self.keeps = site.block >= first, site.block == backout and site.closes_block
        released = config.init == "released"
        second = 1.5 if released and not self.reads_second else 1.0
        writes = Values((1.0, second)) if self.parts else Constant(1.0)
        kept = Constant(1.1**0.5 if released else 1.0)
        self.lane_weight = self.parameter("lane_weight", (1,), kept, "mixing", stacked=1)
        self.write_weights = self.parameter("write_weights", (1 + self.parts,), writes, "mixing")
        self.embedding_weight = None
        if not self.reads_second:
            self.embedding_weight = self.parameter("embedding_weight", (1,), Constant(0.0), "mixing", stacked=1)

    def read(self, state: Lanes, layout: Layout = None, cache: Any = None) -> tuple[Stream, None, Any]:
        """Returns one of the lanes."""
        return state.second if self.reads_second else state.first, None, cache

    def write(self, state: Lanes, update: Stream, context: Views, carry: None) -> Lanes:
        """Returns both lanes with their share of the update, and what is kept for the end."""
        first = self._lane(0, state, update)
        second = self._lane(1, state, update) if self.parts else first
        return Lanes(first, second, state.embedding, (first,) if self.keeps else state.kept)

    def _lane(self, lane: int, state: Lanes, update: Stream) -> Stream:
        weights = self._weights(lane)
        sources = (state.second if lane else state.first, update, state.embedding)
        return mix(sources[: len(weights)], weights.unsqueeze(0))[0]

    def _weights(self, lane: int) -> torch.Tensor:
        """Of the lane, the update and, where it is added, the embedding."""
        write = self.write_weights[lane : lane + 1]
        injected = () if self.embedding_weight is None else (write * self.embedding_weight,)
        return torch.cat((self.lane_weight, write, *injected))

    def explain(self, done: Read | Write) -> Explanation:
        """Returns the sums of the new lanes; a read is no sum."""
        if isinstance(done, Read):
            return Explanation()
        sums = []
        for lane in range(1 + self.parts):
            weights, name = self._weights(lane), f"stream {lane}"
            names = (name, "update", "embedding")[: len(weights)]
            sources = (done.state[lane], done.update, done.state.embedding)[: len(weights)]
            weights = per_token(weights, done.update)
            sums.append(WeightedSum(done.next_state[lane], name, names, sources, weights, "mix"))
        return Explanation(tuple(sums))


class TwoLanesEnds(DepthEnds):
    """Both lanes start as the embeddings and end as their mean, less a part of what was kept."""

    def __init__(self, config: TwoLanesConfig) -> None:
        super().__init__()
        self.config = config
        start = 0.5 if config.init == "released" else 0.0
        self.backout_weight = self.parameter("backout_weight", (1,), Constant(start), "mixing")

    def enter(self, embeddings: Stream, layout: Layout = None, cache: Any = None) -> tuple[Lanes, Any]:
        """Returns the lanes, which are one tensor, and the normalised embedding."""
        added = rms_norm(embeddings, None, torch.finfo(statistics_dtype(embeddings)).eps, self.config.impl)
        lane = embeddings if self.config.embedding == "normalised" else added
        return Lanes(lane, lane, added), cache

    def leave(self, state: Lanes, layout: Layout = None, cache: Any = None) -> tuple[Stream, Any]:
        """Returns the mean of the lanes less a part of the kept one."""
        return mix((state.first, state.second, *state.kept), self._weights().unsqueeze(0))[0], cache

    def _weights(self) -> torch.Tensor:
        return torch.cat((self.backout_weight.new_full((2,), 0.5), -self.backout_weight))

    def explain(self, done: Read) -> Explanation:
        """Returns the last sum."""
        sources, weights = (done.state.first, done.state.second, *done.state.kept), per_token(self._weights(), done.views)
        return Explanation((WeightedSum(done.views, "read", ("stream 0", "stream 1", "kept stream"), sources, weights),))
