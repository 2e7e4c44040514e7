from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from twoaxis.core.errors import ConfigError
from twoaxis.core.parameters import initialise
from twoaxis.core.position import LayerStack
from twoaxis.depth import HyperConnectionsConfig, MHCConfig, ResidualConfig, mhc
from twoaxis.depth.mhc import MHC
from twoaxis.model import Decoder
from twoaxis.ops.stream_matrices import Residual, StreamMatrix
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


RESIDUALS = get_args(Residual)


def smallest_distance_after_two_steps(model: Decoder) -> float:
    """The largest difference between the two streams that are most alike."""
    tokens = toy_tokens()
    for _ in range(2):
        logits = model(tokens)
        found = gradients(model, (logits * noise(tuple(logits.shape), "loss")).sum())
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter -= 0.1 * found[name]
    last = [stream.detach() for stream in trace(model, tokens).states[-1][:N]]
    return min(float((last[i] - last[j]).abs().max()) for i in range(N) for j in range(i))


@pytest.mark.parametrize("read", ["current", "delayed"])
@pytest.mark.parametrize("residual", RESIDUALS)
def test_streams_part_after_two_steps(residual: Any, read: Any) -> None:
    config = MHCConfig(residual=residual, read=read, read_out="sum" if read == "current" else "last_site")
    assert smallest_distance_after_two_steps(toy_decoder(config, perturbed=False)) > 1e-6


def test_a_symmetric_start_would_never_part_the_streams() -> None:
    model = toy_decoder(MHCConfig(preset="deepseek_v41"), perturbed=False)
    with torch.no_grad():
        for sublayer in sublayer_list(model):
            sublayer.depth.base[:N] = 0.3
    assert smallest_distance_after_two_steps(model) < 1e-12


def test_a_delayed_read_has_the_weights_of_the_sublayer_before() -> None:
    model, tokens = toy_decoder(MHCConfig(preset="deepseek_v41")), toy_tokens()
    run = trace(model, tokens)
    read = torch.eye(N, dtype=torch.float64)[0].expand(*tokens.shape, N)
    for index, sublayer in enumerate(sublayer_list(model)):
        *streams, carried = run.states[index]
        assert torch.equal(carried, read)
        expected = sum(read[..., j : j + 1] * streams[j] for j in range(N))
        torch.testing.assert_close(run.views[index][0], expected)
        read = sublayer.depth.weights(tuple(streams))[0].movedim(0, -1)
    expected = sum(read[..., j : j + 1] * run.states[-1][j] for j in range(N))
    torch.testing.assert_close(run.left, expected)


@pytest.mark.parametrize("residual", RESIDUALS)
def test_delayed_reads_that_are_all_equal_are_current_reads(residual: Any) -> None:
    def model(**options: Any) -> Decoder:
        built = toy_decoder(MHCConfig(residual=residual, **options))
        with torch.no_grad():
            for sublayer in sublayer_list(built):
                sublayer.depth.fn[:N] = 0.0
                sublayer.depth.base[:N] = torch.logit(torch.tensor(1 / N, dtype=torch.float64))
        return built

    delayed, current = model(read="delayed", read_out="last_site"), model(read_out="mean")
    torch.testing.assert_close(delayed(toy_tokens()), current(toy_tokens()), rtol=0, atol=1e-12)


@pytest.mark.parametrize("residual", RESIDUALS)
def test_without_scores_they_are_static_hyper_connections(residual: Any) -> None:
    """With the matrix and both weights that the bias alone makes."""
    model = toy_decoder(MHCConfig(residual=residual))
    free = "identity" if residual == "identity" else "free"
    static = toy_decoder(HyperConnectionsConfig(weights="static", residual=free))
    with torch.no_grad():
        for mine, theirs in zip(sublayer_list(model), sublayer_list(static), strict=True):
            mine.depth.fn.zero_()
            read, matrix, write = (None if x is None else x[..., 0, 0] for x in mine.depth.weights(streams(tokens=1)))
            theirs.depth.read_weights.copy_(read)
            theirs.depth.write_weights.copy_(write)
            if matrix is not None:
                theirs.depth.residual_weights.copy_(matrix)
    shared = {name: value for name, value in model.state_dict().items() if ".depth." not in name}
    static.load_state_dict(shared, strict=False)
    torch.testing.assert_close(model(toy_tokens()), static(toy_tokens()), rtol=0, atol=1e-12)


@pytest.mark.parametrize("residual", [residual for residual in RESIDUALS if residual != "identity"])
def test_every_row_of_a_middle_matrix_has_a_gradient_and_its_direction_matters(
    residual: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = toy_decoder(MHCConfig(residual=residual))
    logits = model(toy_tokens())
    found = gradients(model, (logits * noise(tuple(logits.shape), "loss")).sum())
    for name in ("blocks.1.attention.depth.", "blocks.1.swiglu.depth."):
        assert (found[f"{name}base"][RESIDUAL] != 0).all()
        assert (found[f"{name}fn"][RESIDUAL] != 0).any(-1).all()
        assert (found[f"{name}scale"] != 0).all()
    right = StreamMatrix.of
    monkeypatch.setattr(StreamMatrix, "of", lambda self, *given: right(self, *given).transpose(0, 1))
    # A Kronecker product of these factors is symmetric.
    assert ((model(toy_tokens()) - logits).abs().max() > 1e-6) == (residual != "kronecker")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_zeros_and_tiny_rows_stay_finite(dtype: torch.dtype) -> None:
    """The eps of V4.1 is 0 in float16, and its statistics are in float32 whatever the model has."""
    built = scatter(mixer(torch.float32, preset="deepseek_v41")).to(dtype)
    for size in (0.0, 1e-8, 1.0):
        state = tuple((size * stream).requires_grad_() for stream in streams(dtype))
        one_hot = torch.eye(N)[0].expand(2, 5, N)
        view, carry, _ = built.read((*state, one_hot))
        *written, read = built.write((*state, one_hot), torch.ones_like(view), view, carry)
        assert view.dtype == dtype and read.dtype == torch.float32
        found = torch.autograd.grad([x.float().sum() for x in (view, read, *written)], state)
        assert all(bool(x.isfinite().all()) for x in (view, read, *written, *found))


def test_the_norm_and_the_weights_have_an_eps_of_their_own() -> None:
    tiny = tuple(1e-4 * stream for stream in streams())
    v4, v41 = (scatter(mixer(preset=preset)) for preset in ("deepseek_v4", "deepseek_v41"))
    reads = [built.weights(tiny)[0] for built in (v4, v41, scatter(mixer(preset="deepseek_v41", read_eps=1e-3)))]
    assert (reads[0] - reads[1]).abs().max() > 1e-3
    torch.testing.assert_close(reads[2] - reads[1], torch.full_like(reads[1], 1e-3 - 1e-6), rtol=0, atol=1e-15)
    # The scale of the streams does not matter where the eps is far below them.
    torch.testing.assert_close(reads[1], v41.weights(streams())[0], rtol=0, atol=1e-9)


def test_depthbench_starts_saturated_as_the_plain_stream() -> None:
    read, matrix, write = mixer(preset="depthbench", index=2).weights(streams())
    assert matrix is not None
    torch.testing.assert_close(read[:, 0, 0], torch.sigmoid(torch.tensor([-8.0, -8.0, 8.0, -8.0])).double())
    torch.testing.assert_close(write, torch.ones_like(write))
    torch.testing.assert_close(matrix[..., 0, 0], torch.eye(N).double(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"preset": "lucidrains_v2", "init": "lucidrains"}, {"residual": "permutations"}])
def test_the_control_without_mixing_reads_and_writes_alike(options: dict[str, Any]) -> None:
    config = MHCConfig(**options)
    unmixed = config.controls().unmixed
    assert unmixed is not None
    control = MHCConfig.from_data(unmixed)
    assert control.form == replace(config.form, residual="identity") and control.controls().unmixed is None
    mine, theirs = (one.build(LayerStack(D, 1e-6, (2,)))[0][0] for one in (config, control))
    for built in (mine, theirs):
        initialise(built, 0)
    read, _, write = mine.weights(streams(torch.float32))
    other, matrix, other_write = theirs.weights(streams(torch.float32))
    assert matrix is None and torch.equal(read, other) and torch.equal(write, other_write)


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
        ({"preset": "hy_v4", "rounds": 3}, "rounds=3: must be left out, since residual='identity' has no rounds of Sinkhorn"),
        ({"residual": "spectral", "order": "sources_first"}, "must be left out, since residual='spectral' has no rounds"),
        ({"preset": "deepseek_v4", "start": "log"}, "start_eps=1e-06: must be 0 with start='log'"),
        ({"residual": "permutations", "n_streams": 5}, "n_streams=5: must be at most 4"),
        ({"residual": "kronecker", "n_streams": 3}, "n_streams=3: must be a power of 2"),
        ({"residual": "orthogonal", "n_streams": 2}, "n_streams=2: must be 4"),
        ({"residual": "kronecker", "scores": "per_stream"}, "scores='per_stream': must be 'joint' with residual='kronecker'"),
        ({"read_out": "last_site"}, "read_out='last_site': must be 'sum', 'mean' or 'learned' with a current read"),
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
