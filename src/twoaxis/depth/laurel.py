"""LAuReL: learned weights and low-rank maps on the skip connection of each block, of its input and of earlier inputs.

Letters: B batch, T position, D width, r rank of a map, k inputs that one block sees, S = min(k, i + 1) of them in block i.
"""

import math
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor

from twoaxis.core.cost import Cost, Shape
from twoaxis.core.design import InitEquivalence, MixingDesign
from twoaxis.core.errors import ConfigError, problem
from twoaxis.core.parameters import Constant, Fused, Striped
from twoaxis.core.position import LayerStack, SublayerPosition
from twoaxis.core.views import Views
from twoaxis.depth.base import DepthConfig, DepthMixer, Layout, Stream
from twoaxis.depth.history import Granularity, History, HistoryEnds, unit_of
from twoaxis.ops.low_rank import low_rank_sum
from twoaxis.ops.mix import mix
from twoaxis.ops.precision import Impl, statistics_dtype

PreviousMap = Literal["identity", "shared", "separate"]


class LaurelConfig(DepthConfig):
    """Replaces the skip connection of each block by learned weights, a low-rank map of its input, or maps of earlier inputs.

    Equation: rw: x' = a f(x) + b x;  lr: x' = f(x) + x + B A x;  rw_lr: x' = a f(x) + b (x + B A x)
              pa: x' = f(x) + x + sum_{j<k} g_j h(x_{i-j}), x_i = x;  rw_lr_pa: x' = a f(x) + b (x + sum_{j<k} g_j h_j(x_{i-j}))
              (a, b) = 2 softmax(l) or 2 sigmoid(l);  f(x) the sum of the updates of the block;  h = B A or the identity
    Source:   LAuReL, arXiv:2411.07501, eq. 1-6, footnote 2 and tables 4-5; no authors' code. Gemma 3n has another form under
              this name, `laurel_gemma3n`
    Deviates: the paper bounds a and b by softmax or sigmoid and gives neither scale nor start; the factor 2 starts both at 1,
              where a softmax alone would halve the stream in each block. The start of g is ours, too. The paper leaves open
              which activations are the previous ones: the inputs of earlier blocks here. A and B decay here, not l and g
    Shapes:   state (S times [B T D], and inside a block its updates so far); weights in float32, one rounding at the end
    Init:     EXACT: l = 0, B = 0, A orthogonal with entries 1 / sqrt(r D) where column mod r = row, g = 1 / k; identity: g = 0
    Cost:     params per block rw 2, lr 2*r*D, pa 2*r*D + S (shared), 2*r*S*D + S (separate) or S (identity); matrix product
              flops per token 4*r*D for lr, 2*r*D for each input and for each map of pa; state S*D numbers per token, D more
              inside a block; saves r numbers per token and input, and where a and b are learned the sum of updates
    Published: test loss after 10B tokens of C4, 24 layers, 157M parameters, arXiv:2411.07501 table 5: plain 3.0159 (28 layers
              2.9963), rw 2.9557, lr 2.9624, pa 2.9512, rw_lr 2.9531, rw_lr_pa 2.9499, with r = 32 and k = 3. Its parameter
              counts are those of one residual way per layer, of separate maps in rw_lr_pa, and in pa of no maps of rank 32

    Args:
        variant: `rw`, `lr`, `pa`, `rw_lr` or `rw_lr_pa`.
        rank: r; the authors find 32 to 64 good for language models, and use 4 where parameters are scarce.
        n_previous: k, the input of the block itself among them.
        previous_map: h of pa: `shared` by all inputs (eq. 4), `separate` for each (eq. 6), or the `identity`; None means the
            equation of the variant.
        bound: function that bounds a and b.
        granularity: f is a `block`, or each `sublayer`.
        impl: `fused` or `reference`; the same computation, since the plain form is as fast.

    Raises:
        ConfigError: options that the variant does not have, or a rank above the width.

    Example:
        >>> LaurelConfig(variant="rw_lr_pa").maps
        'separate'
    """

    kind: Literal["laurel"] = "laurel"
    variant: Literal["rw", "lr", "pa", "rw_lr", "rw_lr_pa"] = "rw_lr"
    rank: int = Field(default=32, ge=1)
    n_previous: int = Field(default=3, ge=1)
    previous_map: PreviousMap | None = None
    bound: Literal["softmax", "sigmoid"] = "softmax"
    granularity: Granularity = "block"
    impl: Impl = "fused"

    @property
    def design(self) -> MixingDesign:
        """Free weights, and low-rank maps of the block's inputs."""
        value = "block inputs x_i, maps of them" if self.has_previous else "x_i" if self.maps is None else "x_i, B A x_i"
        window, bound = "last k inputs" if self.has_previous else "own state", self.bound if self.has_weights else "none"
        return MixingDesign("none", "none", value, bound, window, self.granularity, "replaces the stream")

    @model_validator(mode="after")
    def _options_fit(self) -> Self:
        idle: tuple[str, ...] = () if self.has_previous else ("n_previous", "previous_map")
        idle += () if self.has_weights else ("bound",)
        idle += () if self.low_rank else ("rank",)
        reason = f", since nothing of variant={self.variant!r} with these options reads it"
        self.refuse_options(idle, reason, "remove it or use another variant")
        return self

    @property
    def has_weights(self) -> bool:
        """Whether a and b are learned."""
        return "rw" in self.variant

    @property
    def has_previous(self) -> bool:
        """Whether earlier inputs are read."""
        return "pa" in self.variant

    @property
    def maps(self) -> PreviousMap | None:
        """Which maps there are; None for none."""
        if self.variant == "rw":
            return None
        return self.previous_map or ("separate" if self.variant == "rw_lr_pa" else "shared")

    @property
    def low_rank(self) -> bool:
        """Whether there are low-rank maps."""
        return self.maps in ("shared", "separate")

    def prepare(self, stack: LayerStack) -> LayerStack:
        """Refuses a rank above the width."""
        if self.low_rank and self.rank > stack.d_model:
            most = f"at most d_model={stack.d_model}, since the rows of A are orthogonal"
            raise ConfigError(problem("rank", self.rank, most, "lower it"))
        return stack

    @property
    def init_equivalence(self) -> InitEquivalence:
        """Exact."""
        return InitEquivalence("exact", "weights start at 1, and maps and earlier inputs at 0")

    def n_inputs(self, unit: int) -> int:
        """Inputs that this block (or sublayer) sees, its own among them."""
        return min(self.n_previous, unit + 1) if self.has_previous else 1

    def cost(self, site: SublayerPosition, shape: Shape) -> Cost:
        """One or two adds inside a block, and the skip connection where it closes."""
        unit, N, D = unit_of(site, self.granularity), shape.total_tokens, site.d_model
        # The sum of updates is added to the input in the read, and to the update in the write.
        inside = Cost(elementwise_flops=N * D * (0 if unit.opens else 2))
        if not unit.closes:
            return inside
        S, r = self.n_inputs(unit.number), self.rank
        M = S if self.maps == "separate" else int(self.low_rank)
        return inside + Cost(
            params=2 * self.has_weights + S * self.has_previous + 2 * M * r * D,
            matmul_flops=2 * N * D * r * (S + M) * self.low_rank,
            elementwise_flops=N * (4 * D if self.low_rank else 2 * (1 + S) * D),
        )

    def build(self, stack: LayerStack) -> "tuple[list[Laurel], HistoryEnds]":
        """Builds weights and maps where a block closes."""
        return [Laurel(self, site) for site in stack.sites], HistoryEnds()


class Laurel(DepthMixer, config=LaurelConfig):
    """See `LaurelConfig`; sources are the inputs of blocks, of which the newest is that of this block."""

    def __init__(self, config: LaurelConfig, site: SublayerPosition) -> None:
        super().__init__()
        unit, _, closes = unit_of(site, config.granularity)
        self.config, self.closes_unit = config, closes
        if not closes:
            return
        S, r, D = config.n_inputs(unit), config.rank, site.d_model
        # Inputs that the next unit reads in addition to its own; the last unit passes on the stream alone.
        self.n_passed = 0 if site.index + 1 == site.stack.n_sublayers else config.n_inputs(unit + 1) - 1
        self.n_maps = S if config.maps == "separate" else 1
        if config.has_weights:
            self.logits = self.parameter("logits", (2,), Constant(0.0), "mixing", stacked=1)
        if config.has_previous:
            start = 0.0 if config.maps == "identity" else 1 / config.n_previous
            self.input_weights = self.parameter("input_weights", (S,), Constant(start), "mixing", stacked=1)
        if config.low_rank:
            start, ranks = Striped(1 / math.sqrt(r * D), r), (r,) * self.n_maps
            shape, down, up = (self.n_maps * r, D), Fused(ranks), Fused(ranks, dim=1)
            self.down = self.parameter("down", shape, start, "matrix", fused=down, grows="inputs", stacked=1)
            self.up = self.parameter("up", shape[::-1], Constant(0.0), "matrix", fused=up, grows="outputs", stacked=1)

    def read(self, state: History, layout: Layout = None, cache: Any = None) -> tuple[Stream, None, Any]:
        """Returns the input of the block plus its updates so far."""
        return state.sources[-1] + state.inside[0] if state.inside else state.sources[-1], None, cache

    def write(self, state: History, update: Stream, context: Views, carry: None) -> History:
        """Returns the state with the update added to the sum of updates, which joins the stream when the block closes."""
        added = state.added(update)
        if not self.closes_unit:
            return History(state.sources, (added,))
        passed = state.sources[len(state.sources) - self.n_passed :]
        return History((*passed, self._residual(added, state.sources)))

    def _residual(self, added: Tensor, inputs: tuple[Tensor, ...]) -> Tensor:
        config, dtype = self.config, statistics_dtype(added)
        scales = torch.ones(2, dtype=dtype, device=added.device)
        if config.has_weights:
            logits = self.logits.to(dtype)
            scales = 2 * (torch.softmax(logits, dim=0) if config.bound == "softmax" else torch.sigmoid(logits))
        a, b = scales.chunk(2)
        g = self.input_weights.to(dtype) if config.has_previous else None
        if config.low_rank:
            weights = b if g is None else b * g
            return low_rank_sum(added, inputs, scales, weights, self.down, self.up, self.n_maps)
        if g is not None:
            # The stream is the last input, which has weight 1 in addition to its g.
            b = b * (g + F.pad(g.new_ones(1), (len(g) - 1, 0)))
        return mix((added, *inputs), torch.cat((a, b)).unsqueeze(0))[0]
