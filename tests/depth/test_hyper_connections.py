from typing import Any

import pytest
import torch
from torch import Tensor

from twoaxis.core.errors import ConfigError
from twoaxis.core.parameters import initialise
from twoaxis.core.position import LayerStack
from twoaxis.depth import HyperConnectionsConfig, ResidualConfig
from twoaxis.depth.hyper_connections import HyperConnections
from twoaxis.testing.measured import gradients, sublayer_list, trace
from twoaxis.testing.toy import noise, toy_decoder, toy_tokens
from twoaxis.train.optim import OptimizerConfig, parameter_groups

D = 8
MIDDLE = "blocks.1."


def mixer(index: int = 1, **options: Any) -> HyperConnections:
    built = HyperConnectionsConfig(**options).build(LayerStack(D, 1e-6, (2,) * 3))[0][index]
    initialise(built, 0)
    return built.double()


def streams(n: int, tokens: int = 3) -> tuple[Tensor, ...]:
    return tuple(noise((2, tokens, D), f"stream {j}") for j in range(n))


def step(built: HyperConnections, state: tuple[Tensor, ...], update: Tensor) -> tuple[Tensor, ...]:
    view, carry, _ = built.read(state)
    return view, *built.write(state, update, view, carry)


@pytest.mark.parametrize("weights", ["static", "dynamic"])
def test_a_permuted_residual_matrix_changes_the_output(weights: Any) -> None:
    model = toy_decoder(HyperConnectionsConfig(n_streams=4, weights=weights))
    before = model(toy_tokens())
    for sublayer in sublayer_list(model)[2:4]:
        sublayer.depth.residual_weights.data = torch.eye(4, dtype=torch.float64)[[1, 2, 3, 0]]
    assert (model(toy_tokens()) - before).abs().max() > 1e-3


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weights": "static"},
        {"norm": "layer_affine"},
        {"norm": "rms_gain"},
        {"preset": "depthbench"},
        {"residual": "identity"},
    ],
)
def test_every_connection_parameter_of_the_middle_has_a_gradient(options: dict) -> None:
    model = toy_decoder(HyperConnectionsConfig(**options))
    logits = model(toy_tokens())
    found = gradients(model, (logits * noise(tuple(logits.shape), "loss")).sum())
    names = [name for name in found if name.startswith(MIDDLE) and ".depth." in name]
    assert names
    assert all((found[name] != 0).all() for name in names)


@pytest.mark.parametrize("weights", ["static", "dynamic"])
@torch.no_grad()
def test_with_the_identity_and_a_mean_read_it_is_the_plain_model(weights: Any) -> None:
    n = 4
    model = toy_decoder(HyperConnectionsConfig(n_streams=n, weights=weights))
    for sublayer in sublayer_list(model):
        depth = sublayer.depth
        depth.read_weights.fill_(1 / n)
        depth.residual_weights.copy_(torch.eye(n))
        depth.write_weights.fill_(1.0)
        if depth.dynamic is not None:
            depth.dynamic.maps.zero_()
    plain = toy_decoder(ResidualConfig())
    plain.load_state_dict({name: value for name, value in model.state_dict().items() if ".depth." not in name})
    run, expected = trace(model, toy_tokens()), trace(plain, toy_tokens())
    for state, stream in zip(run.states, expected.states, strict=True):
        for one in state:
            torch.testing.assert_close(one, stream)
    torch.testing.assert_close(run.left, n * expected.left)
    assert (run.logits - expected.logits).abs().max() < 1e-4


def test_streams_stay_equal_at_the_start_and_part_when_trained() -> None:
    model = toy_decoder(HyperConnectionsConfig(n_streams=3), perturbed=False)
    last = trace(model, toy_tokens()).states[-1]
    assert all(torch.allclose(stream, last[0], rtol=0, atol=1e-12) for stream in last)
    logits = model(toy_tokens())
    found = gradients(model, (logits * noise(tuple(logits.shape), "loss")).sum())
    residual = found["blocks.1.attention.depth.residual_weights"]
    assert (residual[:, 0] - residual[:, 1]).abs().max() > 1e-6


def test_the_stream_that_is_read_first_is_counted_over_sublayers() -> None:
    reads = [mixer(index, n_streams=4).read_weights.argmax().item() for index in range(6)]
    assert reads == [0, 1, 2, 3, 0, 1]


@pytest.mark.parametrize("weights", ["static", "dynamic"])
def test_every_weight_moves_what_its_equation_says(weights: Any) -> None:
    n, update = 3, noise((2, 3, D), "update")
    built, state = mixer(n_streams=n, weights=weights), streams(3)
    residual = built.residual_weights
    assert residual is not None
    with torch.no_grad():
        view, *before = step(built, state, update)
        for j in range(n):
            built.read_weights[j] += 0.5
            torch.testing.assert_close(step(built, state, update)[0], view + 0.5 * state[j])
            built.read_weights[j] -= 0.5
            for i in range(n):
                residual[j, i] += 0.5
                _, *after = step(built, state, update)
                for k in range(n):
                    torch.testing.assert_close(after[k], before[k] + 0.5 * state[j] * (k == i))
                residual[j, i] -= 0.5
            built.write_weights[j] += 0.5
            _, *after = step(built, state, update)
            for k in range(n):
                torch.testing.assert_close(after[k], before[k] + 0.5 * update * (k == j))
            built.write_weights[j] -= 0.5


@pytest.mark.parametrize("row", range(5))
def test_every_map_changes_its_own_results_alone(row: int) -> None:
    n, update = 3, noise((2, 3, D), "update")
    built, state = mixer(n_streams=n), streams(3)
    with torch.no_grad():
        before = step(built, state, update)
        assert built.dynamic is not None
        built.dynamic.maps[row] = 1.0 + noise((D,), "map")
        after = step(built, state, update)
    changed = {place for place, (a, b) in enumerate(zip(before, after, strict=True)) if not torch.equal(a, b)}
    # The read, one destination, or, through the write, all of them.
    assert changed == ({0} if row == 0 else {1, 2, 3} if row == 4 else {row})


def test_only_the_maps_decay() -> None:
    model = toy_decoder(HyperConnectionsConfig(norm="layer_affine"))
    for group in parameter_groups(model, OptimizerConfig()):
        names = {name.rpartition(".")[2] for name in group.parameters if ".depth." in name}
        assert names == {"maps"} if group.weight_decay else "maps" not in names


def test_static_weights_have_no_scores() -> None:
    with pytest.raises(ConfigError, match="norm='rms_gain': must be left out, since static weights have no scores"):
        HyperConnectionsConfig(weights="static", norm="rms_gain")
    with pytest.raises(ConfigError, match="n_streams=0"):
        HyperConnectionsConfig(n_streams=0)


def test_depthbench_is_its_norm_and_fixes_it() -> None:
    assert HyperConnectionsConfig(preset="depthbench").norm == "rms"
    with pytest.raises(ConfigError, match="norm='layer': must be 'rms' with preset='depthbench'"):
        HyperConnectionsConfig(preset="depthbench", norm="layer")


@pytest.mark.parametrize("weights", ["static", "dynamic"])
@torch.no_grad()
def test_without_mixing_every_stream_keeps_what_it_has(weights: Any) -> None:
    built, state = mixer(n_streams=3, weights=weights, residual="identity"), streams(3)
    for parameter in built.parameters():
        parameter.copy_(noise(tuple(parameter.shape), "weights"))
    view, *after = step(built, state, torch.zeros(2, 3, D, dtype=torch.float64))
    for stream, before in zip(after, state, strict=True):
        assert torch.equal(stream, before)
    assert not torch.allclose(view, state[1])


def test_the_control_without_mixing_is_the_same_otherwise() -> None:
    config = HyperConnectionsConfig(preset="depthbench", read_out="mean", rms_eps=1e-6)
    unmixed = config.controls().unmixed
    assert unmixed is not None
    control = HyperConnectionsConfig.from_data(unmixed)
    assert control == config.replace(residual="identity")
    assert control.controls().unmixed is None and HyperConnectionsConfig(n_streams=1).controls().unmixed is None


@torch.no_grad()
def test_a_mean_is_the_sum_over_the_number_of_streams() -> None:
    total, mean = (toy_decoder(HyperConnectionsConfig(read_out=name)) for name in ("sum", "mean"))
    left, other = (trace(model, toy_tokens()).left for model in (total, mean))
    torch.testing.assert_close(left, 4 * other)
