"""Traffic of depth mixers as the meter finds it, against published counts.

Letters: d width, n sources of a read or streams, S sublayers of a source block, N blocks, G sublayers.
"""

from fractions import Fraction
from typing import NamedTuple

import pytest

from twoaxis.core.cost import Shape
from twoaxis.core.position import LayerStack
from twoaxis.depth import (
    AttentionResidualsConfig,
    DeepDeltaConfig,
    DepthConfig,
    FracConnectionsConfig,
    GatedResidualConfig,
    HyperConnectionsConfig,
    LaurelConfig,
    MHCConfig,
    MUDDFormerConfig,
    ResidualConfig,
    ValueResidualConfig,
)
from twoaxis.ledger.decoder_memory import decoder_trace
from twoaxis.ledger.stack import DepthOperation, StackTrace, trace_stack
from twoaxis.model import DecoderConfig
from twoaxis.testing.toy import ATTENTION, decoder_config

D = 64


class ElementCount(NamedTuple):
    """Numbers per token: those in the dtype of the model, and statistics, which are in float32."""

    model: int = 0
    statistics: int = 0

    @property
    def count(self) -> int:
        """All of them."""
        return sum(self)

    def plus(self, *others: "ElementCount") -> "ElementCount":
        """Adds others."""
        return ElementCount(*map(sum, zip(self, *others, strict=True)))


class Flow(NamedTuple):
    """Traffic of one operation: what it reads and writes, its views for the sublayer, and whether the update is saved."""

    read: ElementCount = ElementCount()
    written: ElementCount = ElementCount()
    views: ElementCount = ElementCount()
    saves_update: bool = False

    @property
    def moved(self) -> ElementCount:
        """Read or written."""
        return self.read.plus(self.written)

    def plus(self, other: "Flow") -> "Flow":
        """Traffic of both operations."""
        saves_update = self.saves_update or other.saves_update
        return Flow(self.read.plus(other.read), self.written.plus(other.written), self.views.plus(other.views), saves_update)


STACK = LayerStack(D, 1e-6, (2,) * 4)


def numbers(wide: int, half: int) -> ElementCount:
    """Numbers of the model and statistics, from bytes of one token in float32 and in bfloat16."""
    model = (wide - half) // 2
    return ElementCount(model, wide // 4 - model)


def flow_of(wide: DepthOperation, half: DepthOperation) -> Flow:
    """The traffic of one operation, from its bytes of one token in float32 and in bfloat16."""
    read, written, views = (numbers(getattr(wide, name), getattr(half, name)) for name in ("read", "written", "views"))
    return Flow(read, written, views, wide.saves_update)


def flows(config: DepthConfig, stack: LayerStack = STACK) -> tuple[list[Flow], Flow]:
    """The traffic of every sublayer, and of the ends."""
    wide, half = (trace_stack(config, stack, Shape(1, 1, element_bytes)) for element_bytes in (4, 2))
    sublayers = [flow_of(*pair) for pair in zip(wide.sublayers, half.sublayers, strict=True)]
    return sublayers, flow_of(wide.ends, half.ends)


def in_widths(moved: int) -> Fraction:
    """Numbers per token in units of the width."""
    return Fraction(moved, D)


ADD = Flow(read=ElementCount(2 * D), written=ElementCount(D))


def test_the_residual_reads_two_widths_and_writes_one() -> None:
    sublayers, ends = flows(ResidualConfig())
    assert (sublayers, ends) == ([ADD] * 8, Flow())


def test_a_full_read_moves_what_the_report_counts_and_the_update_once_more() -> None:
    """arXiv:2603.15031, section on inference: n reads and one write of d per sublayer.

    Here each source comes with its inverse rms, and the new source is read once for its own.
    """
    sublayers, _ = flows(AttentionResidualsConfig())
    for index, flow in enumerate(sublayers[1:], start=1):
        n = index + 1
        published, update = (n + 1) * D, D
        assert flow.moved == ElementCount(published + update, statistics=n + 1)
    # The only source of the first sublayer is its view as it is.
    assert sublayers[0].moved == ElementCount(D, statistics=1)


def test_two_phases_move_seven_widths_where_the_report_counts_five_and_a_half() -> None:
    """arXiv:2603.15031, the same table: N/S + 5 = 5.5 of d for S = 16, N = 8, G = 128. Here they are 6.96 of d.

    The report seems to fetch all N sources in each block, which is also twice their mean number (one time as keys, one time as
    values): here every completed source is fetched once. Beyond that it counts three reads and two writes in each sublayer. A
    later sublayer has seven passes here: phase 1 writes its early read, the read fetches that and the running sum and writes
    the view, the write fetches update and running sum and writes the sum. One kernel for a write and the next read would save
    one of them; the report leaves out one more.
    """
    S, N = 16, 8
    G = S * N
    config, stack = AttentionResidualsConfig(block_size=S, schedule="two_phase"), LayerStack(D, 1e-6, (S,) * N)
    moved = ElementCount().plus(*(flow.moved for flow in flows(config, stack)[0]))
    sources, later = N * (N + 1) // 2, N * (S - 1)
    views, updates = G - 1, G
    early = ElementCount(statistics=2 * later * (D + 1))
    running_sum = ElementCount(3 * later * D, statistics=later)
    assert moved == early.plus(running_sum, ElementCount((sources + views + updates) * D, statistics=sources + G))
    published = N * N + 5 * G
    ours = sources + 5 * later + views + updates
    assert (Fraction(published, G), Fraction(ours, G)) == (Fraction(11, 2), Fraction(891, 128))


def test_a_delta_write_moves_the_context_besides_a_plain_write() -> None:
    one, four = DeepDeltaConfig(), DeepDeltaConfig(value_channels=4, compressor="channel")
    assert flows(one)[0][1].moved == ADD.moved.plus(ElementCount(D))
    # All channels for the read and again for the write, and the compressed input for the norm; the code's target reads it too.
    assert flows(four)[0][1].moved == ElementCount((4 + 1) * D + (4 + 2 + 4) * D)
    assert flows(four.replace(value_target="code"))[0][1].moved == ElementCount((4 + 1) * D + (4 + 3 + 4) * D)


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("config", [HyperConnectionsConfig, MHCConfig])
def test_one_kernel_per_call_saves_what_the_unfused_kernels_of_mhc_table_2_pass_to_each_other(
    config: type[HyperConnectionsConfig] | type[MHCConfig], n: int
) -> None:
    """arXiv:2512.24880, table 2, row Hyper-Connections: five kernels, which meet in memory."""
    unfused_read, unfused_written = (5 * n + 1) * D + n * n + 2 * n, (3 * n + 1) * D + n * n + 2 * n
    flow = flows(config(n_streams=n))[0][3]
    # The streams again, of which the weights were made, and the two results that the last kernel adds; the read weights.
    assert unfused_read - flow.read.count == n * D + 2 * n * D + n
    # Those two results, and the read weights.
    assert unfused_written - flow.written.count == 2 * n * D + n


@pytest.mark.parametrize("n", [2, 4, 8])
def test_the_write_moves_what_the_fused_kernel_of_mhc_moves(n: int) -> None:
    """arXiv:2512.24880, section 4.3.1: the kernel of H_post, H_res and the merge reads (n + 1) d and writes n d."""
    weights = ElementCount(statistics=n * n + n)
    read = Flow(read=ElementCount(n * D), written=weights.plus(ElementCount(D)), views=ElementCount(D))
    fused = Flow(read=weights.plus(ElementCount((n + 1) * D)), written=ElementCount(n * D), saves_update=True)
    assert flows(MHCConfig(n_streams=n))[0][1] == read.plus(fused)


@pytest.mark.parametrize("n", [2, 4, 8])
def test_the_total_that_the_attention_residuals_report_gives_for_mhc_is_that_of_the_unfused_kernels(n: int) -> None:
    """arXiv:2603.15031: (8 m + 2) d + 2 m^2 + 4 m with m streams; 34 d for 4 of them, and 14 d with one kernel per call."""
    published = 8 * n + 2 + Fraction(2 * n * n + 4 * n, D)
    moved = in_widths(flows(MHCConfig(n_streams=n))[0][1].moved.count)
    assert moved == 3 * n + 2 + Fraction(2 * n * n + 2 * n, D)
    assert published - moved == 5 * n + Fraction(2 * n, D)


@pytest.mark.parametrize(
    ("config", "weights"),
    [
        (HyperConnectionsConfig(n_streams=4, weights="static"), 0),
        (MHCConfig(preset="hy_v4", n_streams=4), 4),
        (GatedResidualConfig(n_streams=4), 4),
        # Between 8 pieces, and from 2 fractions of the update to all of them.
        (FracConnectionsConfig(form="lucidrains", n_streams=4, n_fractions=2), 8 * 8 + 2 * 8),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_only_the_weights_of_a_token_differ_between_mixers_of_streams(config: DepthConfig, weights: int) -> None:
    first, second, *_ = flows(config)[0]
    assert (second.moved.model, second.moved.statistics) == ((3 * 4 + 2) * D, 2 * weights)
    # The streams of the first sublayer are one tensor, which its read and its write fetch once each.
    assert first.moved.plus(ElementCount(2 * 3 * D)) == second.moved


def test_fractions_of_one_stream_cost_a_view_more_than_the_plain_sum() -> None:
    sublayers, ends = flows(FracConnectionsConfig(n_fractions=4))
    assert sublayers[1].moved == ElementCount(5 * D, statistics=2 * (4 * 4 + 4))
    assert ends == Flow()


def test_a_mudd_read_fetches_each_source_once_for_all_ways() -> None:
    sublayers, ends = flows(MUDDFormerConfig())
    for block in range(1, 4):
        S = block + 1
        sums = Flow(read=ElementCount(S * D), written=ElementCount(4 * D), views=ElementCount(3 * D))
        assert sublayers[2 * block] == ADD.plus(sums)
        assert sublayers[2 * block + 1] == ADD
    assert ends == Flow(read=ElementCount(5 * D), written=ElementCount(D), views=ElementCount(D))


def new_tensors(config: DepthConfig) -> list[int]:
    """Counts the tensors of each state that no earlier state holds."""
    seen: set[int] = set()
    found = []
    for state in trace_stack(config, STACK, Shape(1, 1)).states:
        held = {tensor.number for tensor in state}
        found.append(len(held - seen))
        seen |= held
    return found


def test_histories_gain_one_tensor_per_sublayer_and_streams_are_new_everywhere() -> None:
    assert new_tensors(ResidualConfig()) == new_tensors(MUDDFormerConfig()) == [1] * 9
    # Inside a parallel block the residual stays what it was.
    assert new_tensors(MUDDFormerConfig(residual="parallel")) == [1, 1, 1, 2, 1, 2, 1, 2, 1]
    assert new_tensors(MUDDFormerConfig(source_norm="rms")) == [1, 2, 1, 2, 1, 2, 1, 2, 1]
    assert new_tensors(LaurelConfig(variant="pa")) == [1] * 9
    assert new_tensors(MHCConfig(n_streams=3)) == [1, *[3] * 8]
    # A source, and its inverse rms.
    for block_size in (1, 2, 8):
        assert new_tensors(AttentionResidualsConfig(block_size=block_size)) == [2] * 9


def test_values_are_recorded_once_and_read_by_every_later_layer() -> None:
    def traced(depth: DepthConfig) -> StackTrace:
        blocks = decoder_config(ATTENTION).blocks
        return decoder_trace(DecoderConfig(vocab_size=11, d_model=8, n_layers=3, depth=depth, blocks=blocks), Shape(1, 2))

    # Of two tokens, since the values of one lie apart from other heads by themselves.
    width, add = 2 * 2 * 4 * 4, (2 * 16 * 4, 2 * 8 * 4)
    learnable, svformer, dense = (traced(ValueResidualConfig(variant=name)) for name in ("learnable", "svformer", "dense"))
    found = [(one.read - add[0], one.written - add[1]) for one in learnable.sublayers[::2]]
    assert found == [(width, width), (2 * width, width), (2 * width, width)]
    found = [(one.read - add[0], one.written - add[1]) for one in svformer.sublayers[::2]]
    assert found == [(width, width), (0, 0), (0, 0)]
    # The stream and the values of all layers but the last, which no layer reads.
    assert [tensor.saved for tensor in dense.states[-1]] == [True, True, True, False]
