from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from twoaxis.core.errors import ConfigError
from twoaxis.core.parameters import initialise
from twoaxis.core.position import LayerStack
from twoaxis.depth import MHCConfig, ResidualConfig, mhc
from twoaxis.depth.mhc import MHC
from twoaxis.testing.measured import gradients, sublayer_list, trace
from twoaxis.testing.toy import noise, toy_decoder, toy_tokens

N = 4
D = 8
RESIDUAL = slice(2 * N, None)
"""The rows of the residual in the map and base of joint scores."""


def mixer(dtype: torch.dtype = torch.float64, index: int = 1, **options: Any) -> MHC:
    built = MHCConfig(**options).build(LayerStack(D, 1e-6, (2,) * 3))[0][index]
    initialise(built, 0)
    return built.to(dtype)


def streams(dtype: torch.dtype = torch.float64, tokens: int = 5) -> tuple[Tensor, ...]:
    return tuple(noise((2, tokens, D), f"stream {j}").to(dtype) for j in range(N))


@torch.no_grad()
def scatter(built: MHC, size: float = 0.5) -> MHC:
    """Moves every logit away from its start, by as much for each token as for all of them."""
    built.scale.fill_(1.0)
    built.fn.copy_(size / (N * D) ** 0.5 * noise(tuple(built.fn.shape), "fn"))
    built.base.copy_(size * noise(tuple(built.base.shape), "base"))
    return built


@pytest.mark.parametrize("preset", ["paper", "lucidrains_v1", "lucidrains_v2", "deepseek_v4", "glm5"])
def test_matrices_are_doubly_stochastic(preset: str) -> None:
    _, matrix, _ = scatter(mixer(preset=preset)).weights(streams())
    assert matrix is not None and matrix.min() > 0
    # The eps of DeepSeek's form leaves the sums that much below one.
    budget = 1e-5 if preset in ("deepseek_v4", "glm5") else 1e-9
    for axis in (0, 1):
        torch.testing.assert_close(matrix.sum(axis), torch.ones_like(matrix[0]), rtol=0, atol=budget)


@pytest.mark.parametrize("preset", ["paper", "lucidrains_v1"])
@pytest.mark.parametrize("autocast", [False, True])
def test_matrices_stay_doubly_stochastic_in_half_precision(preset: str, autocast: bool) -> None:
    dtype = torch.float32 if autocast else torch.bfloat16
    built = scatter(mixer(dtype, preset=preset))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        _, matrix, write = built.weights(streams(dtype, tokens=2048))
    assert matrix is not None and matrix.dtype == write.dtype == torch.float32
    for axis in (0, 1):
        assert (matrix.sum(axis) - 1).square().mean().sqrt() < 1e-5


@given(base=st.lists(st.floats(-1, 1), min_size=N * N, max_size=N * N), tokens=st.integers(1, 3))
@settings(max_examples=20)
def test_equal_streams_stay_the_plain_residual(base: list[float], tokens: int) -> None:
    built = mixer()
    with torch.no_grad():
        built.base[RESIDUAL] = torch.tensor(base, dtype=torch.float64)
    x, update = noise((2, tokens, D), "x"), noise((2, tokens, D), "update")
    state = (x,) * N
    view, carry, _ = built.read(state)
    written = built.write(state, update, view, carry)
    for stream in written:
        torch.testing.assert_close(stream, x + update, rtol=0, atol=1e-13)
    # The read takes 0.7 of one stream and 0.1 of each other; its logits are float32 numbers.
    torch.testing.assert_close(view, x, rtol=1e-6, atol=0)


def test_row_is_source_and_column_is_destination() -> None:
    built = mixer()
    with torch.no_grad():
        # Stream j goes to stream j + 1.
        built.base[RESIDUAL] = 40 * torch.roll(torch.eye(N, dtype=torch.float64), 1, dims=1).flatten()
    state, update = streams(), torch.zeros(2, 5, D, dtype=torch.float64)
    view, carry, _ = built.read(state)
    written = built.write(state, update, view, carry)
    for j in range(N):
        torch.testing.assert_close(written[(j + 1) % N], state[j], rtol=0, atol=1e-12)


def test_a_permutation_of_streams_changes_the_output() -> None:
    model, tokens = toy_decoder(MHCConfig()), toy_tokens()
    before = model(tokens)
    with torch.no_grad():
        for sublayer in sublayer_list(model)[1:-1]:
            sublayer.depth.base[RESIDUAL] = 30 * torch.roll(torch.eye(N), 1, dims=0).flatten()
    assert (model(tokens) - before).abs().max() > 1e-3


def test_identity_mixing_with_means_is_the_plain_model() -> None:
    model, plain = toy_decoder(MHCConfig(read_out="mean"), perturbed=False), toy_decoder(ResidualConfig(), perturbed=False)
    with torch.no_grad():
        for sublayer in sublayer_list(model):
            quarter = -torch.log(torch.tensor(N - 1, dtype=torch.float64))
            sublayer.depth.base[:N] = quarter
            sublayer.depth.base[RESIDUAL] = 40 * torch.eye(N).flatten()
    tokens = toy_tokens()
    torch.testing.assert_close(model(tokens), plain(tokens), rtol=0, atol=1e-12)


def test_every_weight_has_a_gradient_where_it_can_matter() -> None:
    model, tokens = toy_decoder(MHCConfig()), toy_tokens()
    logits = model(tokens)
    found = gradients(model, (logits * noise(tuple(logits.shape), "loss")).sum())
    names = [name for name in found if name.endswith("depth.base")]
    of_reads_and_writes = [float(found[name][: 2 * N].abs().min()) for name in names]
    of_mixing = [float(found[name][RESIDUAL].abs().max()) for name in names]
    assert min(of_reads_and_writes) > 1e-6
    assert min(of_mixing[1:-1]) > 1e-6
    # Equal streams look the same after any mixing, and a sum sees none.
    assert of_mixing[0] < 1e-14
    assert of_mixing[-1] < 1e-3 * min(of_mixing[1:-1])


def test_streams_part_after_two_steps() -> None:
    model, tokens = toy_decoder(MHCConfig(), perturbed=False), toy_tokens()
    for _ in range(2):
        logits = model(tokens)
        found = gradients(model, (logits * noise(tuple(logits.shape), "loss")).sum())
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter -= 0.1 * found[name]
    last = [stream.detach() for stream in trace(model, tokens).states[-1]]
    assert min(float((last[i] - last[j]).abs().max()) for i in range(N) for j in range(i)) > 1e-6


@pytest.mark.parametrize("sublayers", [1, 12, 60])
def test_the_composite_gain_is_bounded(sublayers: int) -> None:
    stack, state = LayerStack(D, 1e-6, (1,) * sublayers), streams()
    product = torch.eye(N, dtype=torch.float64).expand(2, 5, N, N)
    for index, built in enumerate(MHCConfig().build(stack)[0]):
        initialise(built, index)
        _, matrix, _ = scatter(built.double(), size=0.5).weights(state)
        assert matrix is not None
        product = product @ matrix.detach().permute(2, 3, 0, 1)
    gains = product.abs().sum(-1).max(), product.abs().sum(-2).max()
    assert max(float(gain) for gain in gains) < 1 + 1e-6


def test_a_write_magnitude_keeps_writes_of_one() -> None:
    _, _, write = mixer(preset="hy_v4", write_eps=0.0, write_magnitude=3.0).weights(streams())
    torch.testing.assert_close(write, torch.ones_like(write), rtol=0, atol=1e-6)


def test_lucidrains_starts_as_published() -> None:
    read, matrix, write = mixer(preset="lucidrains_v1", init="lucidrains", index=2).weights(streams())
    assert matrix is not None
    torch.testing.assert_close(read[:, 0, 0], torch.tensor([0.5, 0.5, 0.731, 0.5], dtype=torch.float64), rtol=0, atol=1e-3)
    torch.testing.assert_close(torch.diagonal(matrix[..., 0, 0]), torch.full((N,), 0.475).double(), rtol=0, atol=1e-3)
    torch.testing.assert_close(write, torch.full_like(write, 1.462), rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"n_streams": 1}, "n_streams=1: must be >= 2"),
        ({"preset": "hy_v4", "rounds": 3}, "rounds=3: must be left out, since the residual is the identity"),
        ({"preset": "deepseek_v4", "start": "log"}, "start_eps=1e-06: must be 0 with start='log'"),
        ({"preset": "hy_v4", "init": "lucidrains"}, "use 'hy_v4', or residual='sinkhorn'"),
        ({"write_magnitude": 1.0}, "write_magnitude=1.0: must be above 1 with init='preserving'"),
        ({"preset": "papr"}, "did you mean 'paper'"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        MHCConfig(**options)


def test_options_are_checked_where_asserts_are_dropped() -> None:
    module = {"__name__": "twoaxis.depth.mhc_optimised"}
    exec(compile(Path(mhc.__file__).read_text(encoding="utf-8"), mhc.__file__, "exec", optimize=1), module)
    config: Any = module["MHCConfig"]
    with pytest.raises(ConfigError, match="start_eps=1e-06: must be 0 with start='log'"):
        config(preset="deepseek_v4", start="log")


def test_an_option_overrides_its_preset_alone() -> None:
    config = MHCConfig(preset="deepseek_v4", rounds=2, read_out="sum")
    assert (config.form.rounds, config.form.read_out, config.form.start) == (2, "sum", "softmax")
    assert config.replace(preset="lucidrains_v1").form.order == "sources_first"
