"""DenseFormer: after a block, the stream becomes a learned weighted sum of the outputs of all blocks so far.

Letters: B batch, T position, D width, S sources of one row.
"""

from collections.abc import Mapping
from typing import Literal, Self

import torch
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor

from twoaxis.core.cost import Cost, Shape
from twoaxis.core.equivalence import InitEquivalence
from twoaxis.core.errors import ConfigError, problem
from twoaxis.core.mixing_design import MixingDesign
from twoaxis.core.parameters import Constant, Values
from twoaxis.core.site import Site, Stack
from twoaxis.core.views import Views
from twoaxis.core.weighted_sum import WeightedSum, per_token, unit_name
from twoaxis.depth.base import DepthConfig, DepthEnds, DepthMixer
from twoaxis.ops.mix import mix
from twoaxis.ops.precision import Impl

Outputs = tuple[Float[Tensor, "B T D"], ...]
"""The depth state: the outputs that later rows still read, oldest first, then the stream, which may be the newest of them."""

DILUTED = 1e-4
"""What the authors' connect-to-last baseline starts every weight at but the newest."""


class DenseFormerConfig(DepthConfig):
    """Replaces the output of a block by a depth-weighted average (DWA): a free weighted sum of this and earlier outputs.

    Equation: X_i = Y_{i-1} + (what the sublayers of unit i add),  Y_0 = X_0 = embeddings
              Y_i = sum_j alpha_ij X_j over j <= i, j = i mod dilation, if period divides i, else Y_i = X_i
              connect_to_last: Y_L = sum_{j <= L} alpha_j X_j, all other Y_i = X_i;  skip_gains: x' = g x + f(Norm(x))
    Source:   DenseFormer, arXiv:2402.02622v2, eq. 1 and section 3; authors' code epfml/DenseFormer, denseformer/denseformer.py
              (`groups`: experiments/models/denseformer.py); `sublayer`: GPT-BERT, arXiv:2410.24159, and its code
              ltgoslo/gpt-bert, pretraining/model_extra.py
    Deviates: weights of rows and gains do not decay here, since decay pulls them to 0, where the plain model is not. The
              authors (and GPT-BERT) decay them as they do matrices: optimizer.groups=[{pattern="*.depth.weights",
              weight_decay=0.1}], for skip_gains optimizer.groups=[{pattern="*.depth.gain", weight_decay=0.1}]. Their package
              keeps its sources between calls; here they are the depth state, and only as long as a later row reads them. The
              pseudocode of GPT-BERT leaves the embedding out of its sums, its code and `sublayer` do not
    Shapes:   state: tuple of [B T D], the outputs still to be read and the stream; sums in float32, rounded once
    Init:     EXACT: alpha = 1 on the newest source and 0 elsewhere (connect_to_last: 1e-4, so NONE), g = 1
    Cost:     params S per row, L (L + 3) / 2 in all for 1x1; flops 2*S*D per token and row; state at most (L + 1)*D numbers
              per token; keeps one output per row that no later row reads; moves 3*D numbers per sublayer, (S + 3)*D at a row
    Published: perplexity on OpenWebText2, 48 blocks, arXiv:2402.02622v2 tables 1 and 4: plain 18.61, 1x1 17.84, 4x1 17.86, 4x5
              17.87, 12x1 17.96, connect-to-last 18.33, last-4 18.28, skips with gains 18.45 (kxp: dilation x period). The paper
              does not say whether 4x5 was run with `every` (its text and package) or `groups` (its training code).
              GPT-BERT has `sublayer` rows; without them its perplexity is 0.4 higher (arXiv:2410.24159 table 2)

    Args:
        variant: `dwa`, or one of the baselines `connect_to_last` and `skip_gains`.
        dilation: a row reads every `dilation`-th output, counted back from the newest.
        period: units between two rows.
        stored: `every` output can be read, or only those of `groups` of `period` units, which dilation then counts.
        granularity: what a unit is: a `block`, or a `sublayer`.
        last: a row reads the embedding and this many newest outputs; None reads them all.
        older_init: start of all weights of a row but the newest; None means the authors' (0; connect_to_last 1e-4).
        impl: `fused` or `reference`.

    Raises:
        ConfigError: options that exclude each other, or groups that do not fill the stack.

    Example:
        >>> DenseFormerConfig(dilation=4, period=5).rows(20)
        {5: (1, 5), 10: (2, 6, 10), 15: (3, 7, 11, 15), 20: (0, 4, 8, 12, 16, 20)}
    """

    kind: Literal["denseformer"] = "denseformer"
    variant: Literal["dwa", "connect_to_last", "skip_gains"] = "dwa"
    dilation: int = Field(default=1, ge=1)
    period: int = Field(default=1, ge=1)
    stored: Literal["every", "groups"] = "every"
    granularity: Literal["block", "sublayer"] = "block"
    last: int | None = Field(default=None, ge=1)
    older_init: float | None = None
    impl: Impl = "fused"

    @property
    def design(self) -> MixingDesign:
        """Free weights."""
        unit = "X_j" if self.granularity == "block" else "x_g"
        gains = self.variant == "skip_gains"
        sources = "all" if self.last is None else "e, last n"
        period = "" if self.period == 1 else f", every {self.period} units"
        return MixingDesign(
            query="none",
            key="none",
            value="x_g" if gains else f"{unit}, e",
            normaliser="none",
            window="own state" if gains else sources if self.dilation == 1 else f"{sources}, 1 of {self.dilation}",
            sharing="sublayer" if gains or self.granularity == "sublayer" else "block",
            injection="replaces what the head sees" if self.variant == "connect_to_last" else f"replaces the stream{period}",
        )

    @model_validator(mode="after")
    def _options_fit(self) -> Self:
        defaults = {name: field.default for name, field in type(self).model_fields.items()}
        without = ("dilation", "period", "stored", "last") if self.variant == "connect_to_last" else ()
        if self.variant == "skip_gains":
            without = ("dilation", "period", "stored", "last", "granularity", "older_init")
        for name in without:
            if getattr(self, name) != defaults[name]:
                allowed = f"left out, since {self.variant!r} has no such rows"
                raise ConfigError(problem(name, getattr(self, name), allowed, "remove it or use variant='dwa'"))
        if self.last is not None and self.dilation > 1:
            raise ConfigError(problem("last", self.last, "None when dilation > 1", "set dilation=1 or remove last"))
        return self

    def rows(self, n_units: int) -> dict[int, tuple[int, ...]]:
        """The outputs that are summed after each unit with a row, oldest first; 0 is the embedding, unit 1 the first."""
        if self.variant == "skip_gains":
            return {}
        if self.variant == "connect_to_last":
            return {n_units: tuple(range(n_units + 1))}
        apart = self.period if self.stored == "groups" else 1
        stride = self.dilation * apart
        rows = {end: tuple(range(end % stride, end + 1, stride)) for end in range(self.period, n_units + 1, self.period)}
        if self.last is None:
            return rows
        return {end: tuple(s for s in row if s == 0 or s > end - self.last * apart) for end, row in rows.items()}

    def prepare(self, stack: Stack) -> Stack:
        """Returns the stack as it is.

        Raises:
            ConfigError: groups that do not fill the stack.
        """
        n_units = self.units(stack)
        if self.stored == "groups" and n_units % self.period:
            allowed = f"a divisor of the {n_units} {self.granularity}s when stored='groups'"
            raise ConfigError(problem("period", self.period, allowed, "change n_layers, or use stored='every'"))
        return stack

    def units(self, stack: Stack) -> int:
        """Number of units of a whole stack."""
        return stack.n_blocks if self.granularity == "block" else stack.n_sublayers

    @property
    def first_weight(self) -> float:
        """The start of all weights of a row but the newest."""
        if self.older_init is not None:
            return self.older_init
        return DILUTED if self.variant == "connect_to_last" else 0.0

    @property
    def init_equivalence(self) -> InitEquivalence:
        """Exact while rows start one-hot."""
        if self.first_weight:
            return InitEquivalence("none", "older outputs start with a weight that is not 0")
        return InitEquivalence("exact", "every row starts with weight 1 on the newest output and 0 on the others")

    def cost(self, site: Site, shape: Shape) -> Cost:
        """One add, and one sum where a unit with a row ends."""
        N, D = shape.total_tokens, site.d_model
        if self.variant == "skip_gains":
            return Cost(params=1, elementwise_flops=2 * N * D)
        after = _Place(self, site.stack, site.index + 1)
        if after.row is None:
            return Cost(elementwise_flops=N * D)
        S = len(after.row)
        return Cost(params=S, elementwise_flops=N * D * (1 + 2 * S))

    def build(self, site: Site) -> "SkipGain | DenseFormer":
        """Builds the mixer of one sublayer."""
        return SkipGain() if self.variant == "skip_gains" else DenseFormer(self, site)

    def build_ends(self, stack: Stack) -> "OutputsEnds":
        """Builds the ends."""
        return OutputsEnds()


class _Place:
    """A boundary between sublayers: which outputs the state holds there, and the row of the unit that ends there, if any."""

    def __init__(self, config: DenseFormerConfig, stack: Stack, index: int) -> None:
        rows = config.rows(config.units(stack))
        if config.granularity == "sublayer":
            self.unit, inside = index, False
        else:
            self.unit, inside = _blocks_before(stack, index)
        self.row = None if inside else rows.get(self.unit)
        self.kept = _read_later(rows, self.unit)
        self.stream_is_kept = not inside and self.row is None and self.unit in self.kept


def _blocks_before(stack: Stack, index: int) -> tuple[int, bool]:
    """How many blocks are complete before sublayer `index`, and whether that sublayer lies inside another one."""
    if index == stack.n_sublayers:
        return stack.n_blocks, False
    site = stack.sites[index]
    return site.block, not site.opens_block


def _read_later(rows: Mapping[int, tuple[int, ...]], unit: int) -> tuple[int, ...]:
    """The outputs up to this unit that the rows of later units read."""
    return tuple(sorted({source for end, row in rows.items() if end > unit for source in row if source <= unit}))


class DenseFormer(DepthMixer, config=DenseFormerConfig):
    """See `DenseFormerConfig`."""

    def __init__(self, config: DenseFormerConfig, site: Site) -> None:
        super().__init__()
        before, after = (_Place(config, site.stack, index) for index in (site.index, site.index + 1))
        self.impl: Impl = config.impl
        self.stream_is_kept = before.stream_is_kept
        self.ends_unit = after.unit > before.unit
        # Positions in what is held when the unit has ended: the outputs held before, and the new one behind them.
        held = (*before.kept, after.unit)
        self.row = None if after.row is None else tuple(held.index(source) for source in after.row)
        self.kept = tuple(held.index(source) for source in after.kept)
        self.newest_is_kept = after.stream_is_kept
        what = "block" if config.granularity == "block" else "sublayer"
        self.names = tuple(unit_name(unit, what) for unit in after.row or ())
        if self.row is not None:
            start = (*(config.first_weight for _ in self.row[1:]), 1.0)
            self.weights = self.parameter("weights", (len(start),), Values(start), "mixing")

    def read(self, state: Outputs) -> tuple[Float[Tensor, "B T D"], None]:
        """Returns the stream."""
        return state[-1], None

    def write(self, state: Outputs, update: Float[Tensor, "B T D"], context: Views, carry: None) -> Outputs:
        """Returns the state with the update added and, where a unit with a row ends, the stream replaced by the row's sum."""
        outputs = self._outputs(state, update)
        if not self.ends_unit:
            return outputs
        kept = tuple(outputs[index] for index in self.kept)
        if self.row is not None:
            (stream,) = mix([outputs[index] for index in self.row], self.weights.unsqueeze(0), self.impl)
            return (*kept, stream)
        return kept if self.newest_is_kept else (*kept, outputs[-1])

    def write_sums(
        self, state: Outputs, update: Float[Tensor, "B T D"], carry: None, following: Outputs
    ) -> tuple[WeightedSum, ...]:
        """The sum of the row, which is what the next unit reads."""
        if self.row is None:
            return ()
        outputs = self._outputs(state, update)
        sources, made = tuple(outputs[index] for index in self.row), following[-1]
        return (WeightedSum(made, "stream", self.names, sources, per_token(self.weights, made)),)

    def _outputs(self, state: Outputs, update: Float[Tensor, "B T D"]) -> Outputs:
        """The outputs that are held, and the stream with the update behind them."""
        # Under autocast the update may be narrower than the stream that it joins.
        newest = state[-1] + update.to(state[-1].dtype)
        return (*(state if self.stream_is_kept else state[:-1]), newest)


class SkipGain(DepthMixer):
    """The baseline of the same authors that only scales the stream; see `DenseFormerConfig`."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = self.parameter("gain", (1,), Constant(1.0), "mixing")

    def read(self, state: Outputs) -> tuple[Float[Tensor, "B T D"], None]:
        """Returns the stream."""
        return state[-1], None

    def write(self, state: Outputs, update: Float[Tensor, "B T D"], context: Views, carry: None) -> Outputs:
        """Returns g x + update."""
        (stream,) = state
        return (torch.addcmul(update.to(stream.dtype), stream, self.gain),)


class OutputsEnds(DepthEnds):
    """The embedding is the first output and the first stream, and the state ends as the stream alone."""

    def enter(self, embeddings: Float[Tensor, "B T D"]) -> Outputs:
        """Returns the embeddings."""
        return (embeddings,)

    def leave(self, state: Outputs) -> Float[Tensor, "B T D"]:
        """Returns the stream."""
        return state[-1]
