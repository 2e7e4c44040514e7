from typing import Any

import pytest
import torch
from torch import Tensor

from twoaxis.core.errors import ConfigError
from twoaxis.depth import HyperConnectionsConfig, TwoLanesConfig
from twoaxis.model import Decoder
from twoaxis.testing.measured import gradients, sublayer_list, trace
from twoaxis.testing.toy import noise, toy_decoder, toy_tokens


def of(model: Decoder, name: str) -> list[Any]:
    """One attribute of the mixer of each sublayer."""
    return [getattr(sublayer.depth, name) for sublayer in sublayer_list(model)]


def loss(model: Decoder) -> Tensor:
    logits = model(toy_tokens())
    return (logits * noise(tuple(logits.shape), "loss")).sum()


@torch.no_grad()
def test_lanes_are_static_hyper_connections() -> None:
    """Of two streams, each read alone, whose matrix is a multiple of the identity."""
    lanes = toy_decoder(TwoLanesConfig(first_block=0))
    lanes.get_parameter("ends.backout_weight").zero_()
    static = toy_decoder(HyperConnectionsConfig(weights="static", n_streams=2, read_out="mean"))
    for sublayer, other in zip(sublayer_list(lanes), sublayer_list(static), strict=True):
        mine, theirs = sublayer.depth, other.depth
        if mine.embedding_weight is not None:
            mine.embedding_weight.zero_()
        theirs.read_weights.copy_(torch.tensor([0.0, 1.0] if mine.reads_second else [1.0, 0.0]))
        theirs.residual_weights.copy_(mine.lane_weight * torch.eye(2, dtype=torch.float64))
        theirs.write_weights.copy_(mine.write_weights)
    shared = {name: value for name, value in lanes.state_dict().items() if ".depth." not in name and "ends" not in name}
    static.load_state_dict(shared, strict=False)
    torch.testing.assert_close(lanes(toy_tokens()), static(toy_tokens()), rtol=0, atol=1e-12)


def test_before_their_block_both_lanes_are_one_tensor() -> None:
    run = trace(toy_decoder(TwoLanesConfig(first_block=1)), toy_tokens())
    assert [state.first is state.second for state in run.states] == [True] * 3 + [False] * 4
    assert [len(state.kept) for state in run.states] == [0] * 4 + [1] * 3
    assert run.states[4].kept[0] is run.states[4].first


def test_attention_reads_the_first_lane_and_the_feed_forward_the_second() -> None:
    run = trace(toy_decoder(TwoLanesConfig(first_block=0)), toy_tokens())
    for index, state in enumerate(run.states[:-1]):
        torch.testing.assert_close(run.views[index][0], state[index % 2], rtol=0, atol=0)
    assert [name for name in of(toy_decoder(TwoLanesConfig()), "reads_second")] == [False, True] * 3


def test_every_weight_has_a_gradient() -> None:
    model = toy_decoder(TwoLanesConfig())
    found = gradients(model, loss(model))
    names = [name for name in found if ".depth." in name or name.startswith("ends.")]
    assert len(names) == 3 * 5 + 1
    assert all((found[name] != 0).all() for name in names)


def test_lanes_part_when_trained() -> None:
    model = toy_decoder(TwoLanesConfig(first_block=0), perturbed=False)
    first = trace(model, toy_tokens()).states[-1]
    assert torch.equal(first.first, first.second)
    found = gradients(model, loss(model))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter -= 0.1 * found[name]
    last = trace(model, toy_tokens()).states[-1]
    assert (last.first - last.second).abs().max() > 1e-6


def test_the_released_start() -> None:
    model = toy_decoder(TwoLanesConfig(first_block=1, init="released"), perturbed=False)
    writes = [weights.tolist() for weights in of(model, "write_weights")]
    assert writes == [[1.0], [1.0], [1.0, 1.5], [1.0, 1.0], [1.0, 1.5], [1.0, 1.0]]
    assert {round(weight.item() ** 2, 6) for weight in of(model, "lane_weight")} == {1.1}
    assert model.get_parameter("ends.backout_weight").item() == 0.5


def test_the_second_lane_starts_two_thirds_down_as_released() -> None:
    blocks = {n: TwoLanesConfig().blocks(toy_decoder(TwoLanesConfig(), n_layers=n).config.stack) for n in (1, 2, 11)}
    assert blocks == {1: (0, 0), 2: (1, 1), 11: (7, 7)}


@pytest.mark.parametrize("name", ["first_block", "backout_block"])
def test_blocks_that_are_not_there(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}=3: must be below the 3 blocks of the model"):
        toy_decoder(TwoLanesConfig.from_data({name: 3}))
