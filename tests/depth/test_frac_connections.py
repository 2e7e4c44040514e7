from typing import Any

import pytest
import torch
from torch import Tensor

from twoaxis.core.errors import ConfigError
from twoaxis.core.parameters import initialise
from twoaxis.core.position import LayerStack
from twoaxis.depth import FracConnectionsConfig, ResidualConfig
from twoaxis.depth.frac_connections import FracConnections
from twoaxis.testing.measured import gradients
from twoaxis.testing.toy import decoder_config, noise, toy_decoder, toy_tokens

D = 8
MIDDLE = "blocks.1."


def mixer(index: int = 1, **options: Any) -> FracConnections:
    built = FracConnectionsConfig(**options).build(LayerStack(D, 1e-6, (2,) * 3))[0][index]
    initialise(built, 0)
    return built.double()


def streams(n: int) -> tuple[Tensor, ...]:
    return tuple(noise((2, 3, D), f"stream {j}") for j in range(n))


def step(built: FracConnections, state: tuple[Tensor, ...], update: Tensor) -> tuple[Tensor, ...]:
    view, carry, _ = built.read(state)
    return view, *built.write(state, update, view, carry)


@pytest.mark.parametrize("weights", ["static", "dynamic"])
@pytest.mark.parametrize("m", [1, 2, 4, 8])
def test_the_papers_form_starts_as_the_plain_model_to_the_last_bit(m: int, weights: Any) -> None:
    model = toy_decoder(FracConnectionsConfig(n_fractions=m, weights=weights), perturbed=False)
    plain = toy_decoder(ResidualConfig(), perturbed=False)
    torch.testing.assert_close(model(toy_tokens()), plain(toy_tokens()), rtol=0, atol=1e-14)


@pytest.mark.parametrize(("n", "m", "relation"), [(1, 1, "exact"), (3, 1, "up_to_norm"), (1, 2, "none"), (2, 2, "none")])
def test_what_the_other_form_starts_as(n: int, m: int, relation: str) -> None:
    config = FracConnectionsConfig(form="lucidrains", n_streams=n, n_fractions=m)
    assert config.init_equivalence.relation == relation


def test_the_other_form_starts_as_its_package_builds_it() -> None:
    # Its rows are e_(g mod n) for the read and the identity behind, of which every second column is taken for the read.
    built = mixer(0, form="lucidrains", n_fractions=2, weights="static")
    assert built.read_weights.tolist() == [[1, 1], [0, 0]]
    assert built.residual_weights is not None and built.residual_weights.tolist() == [[1, 0], [0, 1]]
    built = mixer(0, form="lucidrains", n_fractions=4, weights="static")
    assert built.read_weights.tolist() == [[1, 1, 1, 0], [0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 0]]


@pytest.mark.parametrize("options", [{}, {"weights": "static"}, {"form": "lucidrains"}, {"form": "lucidrains", "n_streams": 2}])
def test_every_connection_parameter_of_the_middle_has_a_gradient(options: dict) -> None:
    model = toy_decoder(FracConnectionsConfig(n_fractions=2, **options))
    logits = model(toy_tokens())
    found = gradients(model, (logits * noise(tuple(logits.shape), "loss")).sum())
    names = [name for name in found if name.startswith(MIDDLE) and ".depth." in name]
    assert names
    assert all((found[name] != 0).all() for name in names)


@pytest.mark.parametrize("weights", ["static", "dynamic"])
def test_every_weight_of_the_papers_form_moves_what_its_equation_says(weights: Any) -> None:
    m, update, (x,) = 4, noise((2, 3, D), "update"), streams(1)
    built = mixer(n_fractions=m, weights=weights)
    parts, shares, residual = x.chunk(m, -1), update.chunk(m, -1), built.residual_weights
    assert residual is not None
    with torch.no_grad():
        view, before = (y.chunk(m, -1) for y in step(built, (x,), update))
        for j in range(m):
            for i in range(m):
                built.read_weights[j, i] += 0.5
                residual[j, i] += 0.5
                read, after = (y.chunk(m, -1) for y in step(built, (x,), update))
                for k in range(m):
                    torch.testing.assert_close(read[k], view[k] + 0.5 * parts[j] * (k == i))
                    torch.testing.assert_close(after[k], before[k] + 0.5 * parts[j] * (k == i))
                built.read_weights[j, i] -= 0.5
                residual[j, i] -= 0.5
            built.write_weights[j] += 0.5
            after = step(built, (x,), update)[1].chunk(m, -1)
            for k in range(m):
                torch.testing.assert_close(after[k], before[k] + 0.5 * shares[k] * (k == j))
            built.write_weights[j] -= 0.5


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"weights": "static"}, {"form": "lucidrains", "n_streams": 2}])
def test_fractions_that_are_never_mixed_are_read_and_kept_as_they_were(options: dict[str, Any]) -> None:
    built, state = mixer(residual="identity", n_fractions=2, **options), streams(options.get("n_streams", 1))
    for name, parameter in built.named_parameters():
        parameter.copy_(noise(tuple(parameter.shape), name))
    view, *after = step(built, state, torch.zeros(2, 3, D, dtype=torch.float64))
    for stream, before in zip(after, state, strict=True):
        assert torch.equal(stream, before)
    assert not torch.allclose(view, state[0])


def test_the_control_without_mixing_is_the_same_otherwise() -> None:
    config = FracConnectionsConfig(form="lucidrains", n_streams=2, scale_init=0.1)
    unmixed = config.controls().unmixed
    assert unmixed is not None
    control = FracConnectionsConfig.from_data(unmixed)
    assert control == config.replace(residual="identity")
    assert control.controls().unmixed is None and FracConnectionsConfig(n_fractions=1).controls().unmixed is None


def test_in_the_other_form_every_fraction_of_the_update_goes_everywhere() -> None:
    built, update = mixer(form="lucidrains", n_fractions=2, n_streams=2, weights="static"), noise((2, 3, D), "update")
    with torch.no_grad():
        _, *before = step(built, streams(2), 0 * update)
        _, *after = step(built, streams(2), update)
    for old, new in zip(before, after, strict=True):
        for a, b in zip(old.chunk(2, -1), new.chunk(2, -1), strict=True):
            torch.testing.assert_close(b, a + sum(update.chunk(2, -1)))


def test_fractions_that_do_not_divide_the_width() -> None:
    with pytest.raises(ConfigError, match="n_fractions=3: must be a divisor of d_model=8"):
        decoder_config(FracConnectionsConfig(n_fractions=3))


def test_several_streams_have_no_place_in_the_papers_form() -> None:
    with pytest.raises(ConfigError, match="n_streams=2: must be 1 in the paper's form; set form='lucidrains'"):
        FracConnectionsConfig(n_streams=2)
    with pytest.raises(ConfigError, match=r"scale_init=0\.1: must be left out"):
        FracConnectionsConfig(weights="static", scale_init=0.1)
