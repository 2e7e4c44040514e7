"""DenseFormer: after a block, the stream becomes a learned sum of the outputs of all blocks so far.

Letters: B batch, T position, D width, S sources of one row, L blocks (or sublayers, where those are the units).
"""

from collections.abc import Sequence
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator

from twoaxis.core.cost import Cost, Shape
from twoaxis.core.design import InitEquivalence, MixingDesign
from twoaxis.core.errors import ConfigError, problem
from twoaxis.core.parameters import Constant, Values
from twoaxis.core.position import LayerStack, SublayerPosition
from twoaxis.core.views import Views, WeightedSum, per_token, unit_name
from twoaxis.depth.base import DepthConfig, DepthEnds, DepthMixer, Explanation, Layout, Read, Stream, StreamEnds, Write
from twoaxis.depth.history import Granularity, History, HistoryEnds, Sums, n_units, read_later, selection, strided_sums, unit_of
from twoaxis.ops.mix import mix
from twoaxis.ops.precision import Impl

DILUTED = 1e-4
"""The start of every weight of the authors' connect-to-last baseline but the newest."""


class DenseFormerConfig(DepthConfig):
    """Replaces the output of a block by a depth-weighted average (DWA): a free weighted sum of this and earlier outputs.

    Equation: X_i = Y_{i-1} + (updates of unit i),  Y_0 = X_0 = embeddings
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
              per token; saves one output per row that no later row reads
    Published: perplexity on OpenWebText2, 48 blocks, arXiv:2402.02622v2 tables 1 and 4: plain 18.61, 1x1 17.84, 4x1 17.86, 4x5
              17.87, 12x1 17.96, connect-to-last 18.33, last-4 18.28, skips with gains 18.45 (kxp: dilation x period). The paper
              does not say whether 4x5 was run with `every` (its text and package) or `groups` (its training code).
              GPT-BERT has `sublayer` rows; without them its perplexity is 0.4 higher (arXiv:2410.24159 table 2)

    Args:
        variant: `dwa`, or one of the baselines `connect_to_last` and `skip_gains`.
        dilation: a row reads every `dilation`-th output, counted back from the newest.
        period: units between two rows.
        stored: `every` output can be read, or only those of `groups` of `period` units, which dilation then counts.
        granularity: a unit is a `block`, or a `sublayer`.
        last: a row reads the embedding and this many newest outputs; None reads them all.
        older_init: start of all weights of a row but the newest; None means the authors' (0; connect_to_last 1e-4).
        impl: `fused` or `reference`; the same computation, since the plain form is as fast.

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
    granularity: Granularity = "block"
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
            injection="replaces the input of the head" if self.variant == "connect_to_last" else f"replaces the stream{period}",
        )

    @model_validator(mode="after")
    def _options_fit(self) -> Self:
        of_rows = ("dilation", "period", "stored", "last")
        idle = {"connect_to_last": of_rows, "skip_gains": (*of_rows, "granularity", "older_init")}.get(self.variant, ())
        self.refuse_options(idle, f", since {self.variant!r} has no such rows", "remove it or use variant='dwa'")
        if self.last is not None and self.dilation > 1:
            raise ConfigError(problem("last", self.last, "None when dilation > 1", "set dilation=1 or remove last"))
        return self

    def rows(self, n_units: int) -> Sums:
        """The outputs that are summed after each unit with a row, oldest first; 0 is the embedding, unit 1 the first."""
        if self.variant == "skip_gains":
            return {}
        if self.variant == "connect_to_last":
            return {n_units: tuple(range(n_units + 1))}
        apart = self.period if self.stored == "groups" else 1
        return strided_sums(n_units, self.period, self.dilation * apart, None if self.last is None else self.last * apart)

    def rows_of(self, stack: LayerStack) -> Sums:
        """The rows of a stack."""
        return self.rows(n_units(stack, self.granularity))

    def prepare(self, stack: LayerStack) -> LayerStack:
        """Refuses groups that do not fill the stack."""
        units = n_units(stack, self.granularity)
        if self.stored == "groups" and units % self.period:
            allowed = f"a divisor of the {units} {self.granularity}s when stored='groups'"
            raise ConfigError(problem("period", self.period, allowed, "change n_layers, or use stored='every'"))
        return stack

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

    def cost(self, site: SublayerPosition, shape: Shape) -> Cost:
        """One add, and one sum where a unit with a row ends."""
        N, D, unit = shape.total_tokens, site.d_model, unit_of(site, self.granularity)
        if self.variant == "skip_gains":
            return Cost(params=1, elementwise_flops=2 * N * D)
        S = len(self.rows_of(site.stack).get(unit.number + 1, ())) if unit.closes else 0
        return Cost(params=S, elementwise_flops=N * D * (1 + 2 * S))

    def build(self, stack: LayerStack) -> tuple[Sequence[DepthMixer], DepthEnds]:
        """Builds a row where a unit with one ends, or the gains of the baseline."""
        if self.variant == "skip_gains":
            return [SkipGain() for _ in stack.sites], StreamEnds()
        return [DenseFormer(self, site) for site in stack.sites], HistoryEnds()


class DenseFormer(DepthMixer, config=DenseFormerConfig):
    """See `DenseFormerConfig`; sources are the outputs that later rows read, then the stream, which may be the newest."""

    def __init__(self, config: DenseFormerConfig, site: SublayerPosition) -> None:
        super().__init__()
        rows, (unit, opens, self.ends_unit) = config.rows_of(site.stack), unit_of(site, config.granularity)
        # Between two units without a row, the stream is the newest output.
        self.stream_is_kept = opens and unit not in rows and unit in read_later(rows, unit)
        self.row, self.kept = selection(rows, unit + 1)
        self.row = self.row if self.ends_unit else ()
        self.newest_is_kept = self.ends_unit and not self.row and unit + 1 in read_later(rows, unit + 1)
        self.names = tuple(unit_name(source, config.granularity) for source in rows.get(unit + 1, ()))
        if self.row:
            start = (*(config.first_weight for _ in self.row[1:]), 1.0)
            self.weights = self.parameter("weights", (len(start),), Values(start), "mixing", stacked=2)

    def read(self, state: History, layout: Layout = None, cache: Any = None) -> tuple[Stream, None, Any]:
        """Returns the stream."""
        return state.sources[-1], None, cache

    def write(self, state: History, update: Stream, context: Views, carry: None) -> History:
        """Returns the state with the update added and, where a unit with a row ends, the stream replaced by the row's sum."""
        outputs = self._outputs(state.sources, update)
        if not self.ends_unit:
            return History(outputs)
        kept = tuple(outputs[index] for index in self.kept)
        if self.row:
            (stream,) = mix([outputs[index] for index in self.row], self.weights.unsqueeze(0))
            return History((*kept, stream))
        return History(kept if self.newest_is_kept else (*kept, outputs[-1]))

    def _outputs(self, held: tuple[Stream, ...], update: Stream) -> tuple[Stream, ...]:
        """The outputs in the state, and after them the stream with the update."""
        # Under autocast the update may be narrower than the stream that it joins.
        newest = held[-1] + update.to(held[-1].dtype)
        return (*(held if self.stream_is_kept else held[:-1]), newest)

    def explain(self, done: Read | Write) -> Explanation:
        """Returns the sum of the row, which the next unit reads."""
        if isinstance(done, Read) or not self.row:
            return Explanation()
        outputs = self._outputs(done.state.sources, done.update)
        sources, made = tuple(outputs[index] for index in self.row), done.next_state.sources[-1]
        return Explanation((WeightedSum(made, "stream", self.names, sources, per_token(self.weights, made)),))


class SkipGain(DepthMixer):
    """See `DenseFormerConfig` with `variant="skip_gains"`."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = self.parameter("gain", (1,), Constant(1.0), "mixing", stacked=1)

    def write(self, state: Stream, update: Stream, context: Views, carry: Any) -> Stream:
        """Returns g x + update."""
        return torch.addcmul(update.to(state.dtype), state, self.gain)
