import math
from typing import Any

import pytest
import torch
from torch import Tensor

from twoaxis import ConfigError, Decoder, DecoderConfig
from twoaxis.core.cost import Shape
from twoaxis.core.parameters import initialise
from twoaxis.core.position import LayerStack
from twoaxis.depth import LaurelConfig, LaurelGemma3nConfig, ResidualConfig
from twoaxis.depth.history import History
from twoaxis.ledger.stack import trace_stack
from twoaxis.testing.measured import gradients
from twoaxis.testing.toy import ATTENTION, FEED_FORWARD, decoder_config, noise, perturb, toy_decoder, toy_tokens

VARIANTS: list[dict[str, Any]] = [
    {"variant": "rw"},
    {"variant": "rw", "bound": "sigmoid"},
    {"variant": "lr", "rank": 3},
    {"variant": "rw_lr", "rank": 3},
    {"variant": "pa", "rank": 3},
    {"variant": "pa", "rank": 3, "previous_map": "separate"},
    {"variant": "pa", "previous_map": "identity", "n_previous": 2},
    {"variant": "rw_lr_pa", "rank": 3},
    {"variant": "rw_lr_pa", "rank": 3, "previous_map": "shared", "bound": "sigmoid"},
]
EACH = pytest.mark.parametrize("options", VARIANTS, ids=str)


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_starts_as_the_residual_bit_for_bit(options: dict, dtype: torch.dtype) -> None:
    configs = (LaurelConfig(**options, granularity="sublayer"), ResidualConfig())
    model, plain = (Decoder.build(decoder_config(config, n_layers=4)).to(dtype) for config in configs)
    assert torch.equal(model(toy_tokens()), plain(toy_tokens()))


@EACH
@pytest.mark.parametrize("sublayers", [1, 2, 3])
def test_starts_as_the_residual_with_blocks_of_any_length(options: dict, sublayers: int) -> None:
    blocks = ((ATTENTION, FEED_FORWARD, ATTENTION)[:sublayers],)
    model, plain = (toy_decoder(c, perturbed=False, blocks=blocks) for c in (LaurelConfig(**options), ResidualConfig()))
    torch.testing.assert_close(model(toy_tokens()), plain(toy_tokens()), rtol=1e-12, atol=1e-13)


def written_weights(mixer: Any) -> Tensor:
    """The weights of an update and of the stream, read off what is written of either alone."""
    one, none = torch.ones(1, 1, 2), torch.zeros(1, 1, 2)
    found = [mixer.write(History((x,)), update, update, None).sources[-1] for x, update in ((none, one), (one, none))]
    return torch.stack([x[0, 0, 0] for x in found]).detach()


@pytest.mark.parametrize("bound", ["softmax", "sigmoid"])
def test_residual_weights_do_not_halve_the_stream(bound: Any) -> None:
    mixer: Any = LaurelConfig(variant="rw", bound=bound).build(LayerStack(2, 1e-6, (1,)))[0][0]
    initialise(mixer, 0)
    assert written_weights(mixer).tolist() == [1.0, 1.0]
    perturb(mixer)
    scales = written_weights(mixer)
    assert float(scales.min()) > 0 and float(scales.max()) < 2
    if bound == "softmax":
        assert float(scales.sum()) == pytest.approx(2)


@pytest.mark.parametrize(("rank", "width"), [(1, 1), (2, 6), (3, 7), (4, 4)])
@pytest.mark.parametrize("previous_map", ["shared", "separate"])
def test_initial_maps(rank: int, width: int, previous_map: Any) -> None:
    config = LaurelConfig(variant="pa", rank=rank, previous_map=previous_map)
    mixer: Any = config.build(LayerStack(width, 1e-6, (1,) * 3))[0][2]
    initialise(mixer, 0)
    assert not mixer.up.any()
    maps = mixer.down.chunk(3 if previous_map == "separate" else 1)
    for down in maps:
        entry = [[(i % rank == j) / math.sqrt(rank * width) for i in range(width)] for j in range(rank)]
        torch.testing.assert_close(down.detach(), torch.tensor(entry))
        product = down @ down.T
        assert torch.equal(product, torch.diag(product.diagonal())) and bool((product.diagonal() > 0).all())


@EACH
def test_everything_learns_from_the_second_step_on(options: dict) -> None:
    model = toy_decoder(LaurelConfig(**options), perturbed=False)

    def found() -> dict[str, Tensor]:
        logits = model(toy_tokens())
        return gradients(model, (logits * noise(tuple(logits.shape), "loss")).sum())

    first = found()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter -= 0.1 * first[name]
    idle = {name for name, gradient in first.items() if not gradient.any()}
    assert all(name.endswith((".down", ".input_weights")) for name in idle)
    assert all(gradient.any() for gradient in found().values())


def test_number_of_parameters_is_the_papers() -> None:
    """Table 5 of the paper has 24 layers, and counts that fit a width of 768."""
    stack = LayerStack(768, 1e-6, (2,) * 24)
    millions = {}
    for variant in ("rw", "lr", "rw_lr", "rw_lr_pa"):
        name: Any = variant
        config = LaurelConfig(variant=name)
        millions[variant] = sum(config.cost(site, Shape(1, 1)).params for site in stack.sites) / 1e6
    assert millions["rw"] == pytest.approx(0, abs=0.005)
    assert millions["lr"] == pytest.approx(158.40 - 157.20, abs=0.03)
    assert millions["rw_lr"] == pytest.approx(158.40 - 157.20, abs=0.03)
    # Ours has no maps of inputs before the first.
    assert millions["rw_lr_pa"] + 3 * 2 * 32 * 768 / 1e6 == pytest.approx(160.83 - 157.20, abs=0.1)


def test_the_state_keeps_the_inputs_that_are_read_again() -> None:
    config = LaurelConfig(variant="pa", rank=1)
    stack = LayerStack(1, 1e-6, (2,) * 4)
    found = trace_stack(config, stack, Shape(1, 1))
    assert [found.state_elements(index) for index in range(9)] == [1, 2, 2, 3, 3, 4, 3, 4, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"variant": "rw", "rank": 4}, "rank=4: must be left out"),
        ({"variant": "lr", "bound": "sigmoid"}, "bound='sigmoid': must be left out"),
        ({"variant": "lr", "n_previous": 2}, "n_previous=2: must be left out"),
        ({"variant": "pa", "previous_map": "identity", "rank": 4}, "rank=4: must be left out"),
        ({"n_previous": 0}, "n_previous=0: must be >= 1"),
    ],
)
def test_options_that_exclude_each_other(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LaurelConfig(**options)


def test_rank_above_the_width() -> None:
    with pytest.raises(ConfigError, match="rank=9: must be at most d_model=8, since the rows of A are orthogonal; lower it"):
        DecoderConfig(vocab_size=4, d_model=8, n_layers=2, depth=LaurelConfig(rank=9))


def test_form_of_gemma_cannot_be_the_residual() -> None:
    model, plain = (toy_decoder(c, perturbed=False) for c in (LaurelGemma3nConfig(rank=2), ResidualConfig()))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("depth.gain"):
                parameter.zero_()
    assert not torch.allclose(model(toy_tokens()), plain(toy_tokens()), atol=1e-3)
