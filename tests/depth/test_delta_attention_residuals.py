"""Delta Attention Residuals: which sources each form reads, and when it equals the residual."""

from typing import Any

import pytest
import torch
from torch import Tensor

from twoaxis.core.errors import ConfigError
from twoaxis.core.views import QKV
from twoaxis.depth import DeltaAttentionResidualsConfig
from twoaxis.model import Decoder, DecoderConfig
from twoaxis.testing.measured import gradients, trace
from twoaxis.testing.toy import ATTENTION, FEED_FORWARD, noise, toy_decoder, toy_tokens

THREE = ((ATTENTION, FEED_FORWARD, FEED_FORWARD),)


def run(perturbed: bool = True, changes: dict[str, Any] | None = None, **options: Any):  # type: ignore[no-untyped-def]
    model = toy_decoder(DeltaAttentionResidualsConfig.from_data(options), perturbed=perturbed, **(changes or {}))
    return trace(model, toy_tokens())


def loss_and_gradients(model: Decoder) -> dict[str, Tensor]:
    logits = model(toy_tokens())
    return {"logits": logits.detach(), **gradients(model, (logits * noise(tuple(logits.shape), "loss")).sum())}


def test_the_stream_is_the_plain_sum() -> None:
    found = run()
    torch.testing.assert_close(found.left, found.states[0].stream + torch.stack(found.updates).sum(0))


def test_sources_of_every_sublayer() -> None:
    found = run()
    assert [len(state.values) for state in found.states] == [0, 2, 3, 4, 5, 6, 0]
    for index, state in enumerate(found.states[1:-1], start=1):
        for source, update in zip(state.values, [found.states[0].stream, *found.updates[:index]], strict=True):
            torch.testing.assert_close(source, update)


@pytest.mark.parametrize("running", ["excluded", "included"])
def test_block_deltas_telescope(running: str) -> None:
    found = run(block_size=2, running_source=running, changes={"blocks": THREE, "n_layers": 2})
    streams = [state.stream for state in found.states]
    last = found.states[5]
    expected = [streams[0], streams[2] - streams[0], streams[4] - streams[2]]
    for source, delta in zip(last.values, expected, strict=True):
        torch.testing.assert_close(source, delta)
    torch.testing.assert_close(last.running[0], streams[5] - streams[4])
    assert len(last.inverse_rms) == 3 + (running == "included")


def test_released_entries_alternate() -> None:
    found = run(block_size=2, entries="as_released")
    streams = [state.stream for state in found.states]
    first, second, third = found.states[5].values
    torch.testing.assert_close(first, streams[0])
    torch.testing.assert_close(second, streams[2] - streams[0])
    torch.testing.assert_close(third, streams[4] - (streams[2] - streams[0]))


def test_sources_of_the_retrofit_add_up_to_the_stream() -> None:
    for size in (1, 2, 3, 4):
        found = run(block_size=size, running_source="included", changes={"blocks": THREE, "n_layers": 2})
        for state in found.states[1:-1]:
            torch.testing.assert_close(torch.stack((*state.values, *state.running)).sum(0), state.stream)


@pytest.mark.parametrize(
    "options",
    [{}, {"block_size": 3, "running_source": "included"}, {"null_source": "learned"}, {"value_routing": "separate"}],
)
def test_zero_queries_are_the_residual_as_eps_vanishes(options: dict[str, Any]) -> None:
    depth = DeltaAttentionResidualsConfig.from_data(options)
    differences = []
    for eps in (1e-4, 1e-8, 1e-12):
        own = toy_decoder(depth, perturbed=False, norm_eps=eps)
        plain = Decoder.build(own.config.replace(depth="residual"), seed=0).double()
        expected, got = loss_and_gradients(plain), loss_and_gradients(own)
        for name in [name for name in got if ".key_norm." in name or ".value_norm." in name]:
            got[name.replace("key_norm", "norm").replace("value_norm", "norm")] += got[name]
        differences.append(max(float((got[name] - value).abs().max()) for name, value in expected.items()))
    assert differences[0] > 50 * differences[1] > 50 * 50 * differences[2]


@pytest.mark.parametrize("options", [{}, {"block_size": 2}, {"entries": "as_released", "block_size": 2}])
def test_a_zero_factor_is_the_residual_exactly(options: dict[str, Any]) -> None:
    own = toy_decoder(DeltaAttentionResidualsConfig.from_data({"gate": "alpha", **options}), perturbed=False, norm_eps=1e-2)
    plain = Decoder.build(own.config.replace(depth="residual"), seed=0).double()
    assert torch.equal(own(toy_tokens()), plain(toy_tokens()))


def test_a_null_source_has_its_share_at_the_start() -> None:
    """The weight of a zero vector is 1/(n + 1), not 1: it dilutes the others."""
    found = run(perturbed=False, null_source="learned")
    for state, (view,) in zip(found.states[1:-1], found.views[1:], strict=True):
        torch.testing.assert_close(view, state.stream + torch.stack(state.values).sum(0) / (len(state.values) + 1))


def test_values_have_a_read_of_their_own() -> None:
    model = toy_decoder(DeltaAttentionResidualsConfig(value_routing="separate"))
    found = trace(model, toy_tokens())
    assert [len(views) for views in found.views] == [3, 1] * 3
    q, k, v = found.views[2]
    assert torch.equal(q, k) and not torch.allclose(q, v)
    assert isinstance(model.blocks[0].sublayers[0].depth.read(found.states[0])[0], QKV)  # type: ignore[union-attr, operator]


@pytest.mark.parametrize(
    ("depth", "blocks", "message"),
    [
        ({"entries": "as_released", "embedding": "never"}, [["attention"]], r"embedding='never': must be 'second_read' with"),
        ({"entries": "as_released", "running_source": "included"}, [["attention"]], r"running_source='included': must be"),
        ({"value_routing": "separate"}, [["gelu"]], r"value_routing='separate': must be 'shared' where no sublayer takes"),
        ({"block_size": [1, 1]}, [["attention"]], r"block_size=\(1, 1\): must be sizes that add up to the 3 sublayers"),
    ],
)
def test_what_does_not_fit_fails_at_config_time(depth: dict[str, Any], blocks: list[list[str]], message: str) -> None:
    depth = {"kind": "delta_attention_residuals", **depth}
    with pytest.raises(ConfigError, match=message):
        DecoderConfig.from_data({"vocab_size": 8, "d_model": 8, "n_layers": 3, "depth": depth, "blocks": blocks})
