"""The checks on examples of every depth mixer, plus what only single cases need."""

import pytest
import torch

from twoaxis.core.registry import Row
from twoaxis.depth import DEPTH, AttentionResidualsConfig, DepthConfig, ResidualConfig
from twoaxis.testing import Check, depth_checks
from twoaxis.testing.measured import trace
from twoaxis.testing.state import keeps_its_states
from twoaxis.testing.toy import FEED_FORWARD, toy_decoder, toy_tokens

from .matrix import cases


@pytest.mark.parametrize(("config", "check"), cases(DEPTH, depth_checks()))
def test_conformance(config: DepthConfig, check: Check) -> None:
    check.run(config)


# A block that the model does not fill, fills, and that a sublayer or nearly a block follows; one of blocks of one sublayer.
@pytest.mark.parametrize(
    ("sublayers", "block_size"), [(1, 2), (2, 2), (3, 2), (1, 3), (7, 3), (12, 12), (13, 12), (23, 12), (1, 1), (12, 1)]
)
def test_sources_are_immutable_at_any_depth_and_block_size(sublayers: int, block_size: int) -> None:
    config = AttentionResidualsConfig(block_size=block_size)
    keeps_its_states(toy_decoder(config, n_layers=sublayers, blocks=((FEED_FORWARD,),)))


@pytest.mark.parametrize("row", list(DEPTH), ids=lambda row: row.kind)
def test_trace_is_the_decoder(row: Row[DepthConfig]) -> None:
    model, tokens = toy_decoder(row.example(next(iter(row.examples)))), toy_tokens()
    assert torch.equal(trace(model, tokens).logits, model(tokens))


def test_number_of_sources_at_each_read() -> None:
    model = toy_decoder(AttentionResidualsConfig(block_size=2))
    assert [len(state.values) for state in trace(model, toy_tokens()).states] == [1, 2, 2, 3, 3, 4, 4]


def test_residual_is_the_plain_sum() -> None:
    run = trace(toy_decoder(ResidualConfig()), toy_tokens())
    assert torch.allclose(run.left, run.states[0] + torch.stack(run.updates).sum(0), rtol=0, atol=1e-12)
