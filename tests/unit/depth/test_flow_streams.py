"""What depth mixers declare to move, against the counts that papers publish, and what crosses a boundary for the first time.

Letters: d width, n streams, S sources of a sum.
"""

from fractions import Fraction

import pytest

from twoaxis.core.site import Stack
from twoaxis.core.state import Flow, Numbers
from twoaxis.depth import (
    DepthConfig,
    FracConnectionsConfig,
    GatedResidualConfig,
    HyperConnectionsConfig,
    LaurelConfig,
    MHCConfig,
    MUDDFormerConfig,
    ValueResidualConfig,
)
from twoaxis.model import DecoderConfig
from twoaxis.testing.toy import ATTENTION, decoder_config

D = 2560
STACK = Stack(D, 1e-6, (2,) * 4)


def in_widths(moved: int, d: int = D) -> Fraction:
    """Numbers per token in units of the width."""
    return Fraction(moved, d)


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("config", [HyperConnectionsConfig, MHCConfig])
def test_one_kernel_per_call_saves_what_the_unfused_kernels_of_mhc_table_2_pass_to_each_other(
    config: type[HyperConnectionsConfig] | type[MHCConfig], n: int
) -> None:
    """arXiv:2512.24880, table 2, row Hyper-Connections: five kernels, which meet in memory."""
    unfused_read, unfused_written = (5 * n + 1) * D + n * n + 2 * n, (3 * n + 1) * D + n * n + 2 * n
    flow = config(n_streams=n).flow(STACK.sites[3])
    # The streams again, of which the weights were made, and the two results that the last kernel adds; the read weights.
    assert unfused_read - flow.read.count == n * D + 2 * n * D + n
    # Those two results, and the read weights.
    assert unfused_written - flow.written.count == 2 * n * D + n


@pytest.mark.parametrize("n", [2, 4, 8])
def test_the_write_moves_what_the_fused_kernel_of_mhc_moves(n: int) -> None:
    """arXiv:2512.24880, section 4.3.1: the kernel of H_post, H_res and the merge reads (n + 1) d and writes n d."""
    weights = Numbers(statistics=n * n + n)
    read = Flow(read=Numbers(n * D), written=Numbers(D) + weights, views=Numbers(D))
    fused = Flow(read=Numbers((n + 1) * D) + weights, written=Numbers(n * D), keeps_update=True)
    assert MHCConfig(n_streams=n).flow(STACK.sites[1]) == read + fused


@pytest.mark.parametrize("n", [2, 4, 8])
def test_the_total_that_the_attention_residuals_report_gives_for_mhc_is_that_of_the_unfused_kernels(n: int) -> None:
    """arXiv:2603.15031: (8 m + 2) d + 2 m^2 + 4 m with m streams; 34 d for 4 of them, and 14 d with one kernel per call."""
    published = 8 * n + 2 + Fraction(2 * n * n + 4 * n, D)
    moved = in_widths(MHCConfig(n_streams=n).flow(STACK.sites[1]).moved.count)
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
    moved = config.flow(STACK.sites[1]).moved
    assert (moved.model, moved.statistics) == ((3 * 4 + 2) * D, 2 * weights)
    # The streams of the first sublayer are one tensor, which its read and its write fetch once each.
    assert config.flow(STACK.sites[0]).moved == moved - Numbers(2 * 3 * D)


def test_fractions_of_one_stream_cost_a_view_more_than_the_plain_sum() -> None:
    config = FracConnectionsConfig(n_fractions=4)
    assert config.flow(STACK.sites[1]).moved == Numbers(5 * D, statistics=2 * (4 * 4 + 4))
    assert config.ends_flow(STACK) == Flow()


def test_a_mudd_read_fetches_each_source_once_for_all_ways() -> None:
    config = MUDDFormerConfig()
    for block in range(1, 4):
        flow = config.flow(STACK.sites[2 * block])
        S, add = block + 1, Flow(read=Numbers(2 * D), written=Numbers(D))
        assert flow == add + Flow(read=Numbers(S * D), written=Numbers(4 * D), views=Numbers(3 * D))
        assert config.flow(STACK.sites[2 * block + 1]) == add
    assert config.ends_flow(STACK) == Flow(read=Numbers(5 * D), written=Numbers(D), views=Numbers(D))


def new_names(config: DepthConfig, stack: Stack) -> list[int]:
    """How many tensors each state holds that no earlier one held."""
    seen: set[str] = set()
    found = []
    for index in range(stack.n_sublayers + 1):
        names = {leaf.name for leaf in config.state(stack, index)}
        found.append(len(names - seen))
        seen |= names
    return found


def test_histories_gain_one_tensor_per_sublayer_and_streams_are_new_everywhere() -> None:
    assert new_names(MUDDFormerConfig(), STACK) == [1] * 9
    # Inside a parallel block the residual stays what it was.
    assert new_names(MUDDFormerConfig(residual="parallel"), STACK) == [1, 1, 1, 2, 1, 2, 1, 2, 1]
    assert new_names(MUDDFormerConfig(source_norm="rms"), STACK) == [1, 2, 1, 2, 1, 2, 1, 2, 1]
    assert new_names(LaurelConfig(variant="pa"), STACK) == [1] * 9
    assert new_names(MHCConfig(n_streams=3), STACK) == [1, *[3] * 8]


def test_values_are_recorded_once_and_read_by_every_later_layer() -> None:
    stack = DecoderConfig(
        vocab_size=11, d_model=8, n_layers=3, depth=ValueResidualConfig(), blocks=decoder_config(ATTENTION).blocks
    ).stack
    width, add = 2 * 4, Flow(read=Numbers(16), written=Numbers(8))
    copy = Flow(read=Numbers(width), written=Numbers(width))
    sites = stack.sites[::2]
    assert [ValueResidualConfig().flow(site) for site in sites] == [
        add + copy,
        *[add + Flow(read=Numbers(2 * width), written=Numbers(width))] * 2,
    ]
    svformer = ValueResidualConfig(variant="svformer")
    assert [svformer.flow(site) for site in sites] == [add + copy, add, add]
    last = ValueResidualConfig(variant="dense").state(stack, 6)
    assert [leaf.kept for leaf in last] == [True, True, True, False]
