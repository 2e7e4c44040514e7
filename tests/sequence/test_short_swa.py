"""What ShortSWA's output starts at, relative to attention and to the residual scaling of its host."""

import math

import pytest
import torch

from twoaxis.core.parameters import Normal, declarations, initialise
from twoaxis.local import LocalSWAConfig
from twoaxis.model import Decoder, DecoderConfig
from twoaxis.model.trace import sublayer_list
from twoaxis.testing.toy import toy_site

WIDTH, LAYERS = 64, 6


def starts(blocks: list[list[object]]) -> dict[str, float]:
    """The standard deviation that each matrix of the first block declares, by its name."""
    model = Decoder(DecoderConfig.from_data({"vocab_size": 8, "d_model": WIDTH, "n_layers": LAYERS, "blocks": blocks}))
    found = {}
    for name, _, declaration in declarations(model):
        if name.startswith("blocks.0.") and isinstance(declaration.init, Normal):
            found[name.removeprefix("blocks.0.")] = declaration.init.std
    return found


def test_output_starts_at_attentions_scale_in_a_block_of_three_writes() -> None:
    swa = {"kind": "short_swa", "n_heads": 4, "head_dim": 8, "window": 4}
    attention = {"kind": "attention", "n_heads": 4, "head_dim": 8}
    own = starts([[swa, attention, "swiglu"]])
    expected = 0.5 / math.sqrt(4 * 8) / math.sqrt(2 * LAYERS)
    assert own["short_swa.mixer.output.weight"] == pytest.approx(expected, rel=1e-12)
    assert own["attention.mixer.output.weight"] == own["short_swa.mixer.output.weight"]
    assert own["short_swa.mixer.qkv.weight"] == pytest.approx(0.5 / math.sqrt(WIDTH), rel=1e-12)
    # The shared parameters of a model without it start alike.
    plain = starts([[attention, "swiglu"]])
    assert plain.items() <= own.items()


def test_output_weights_have_the_declared_spread() -> None:
    swa = {"kind": "short_swa", "n_heads": 4, "window": 4}
    config = DecoderConfig.from_data({"vocab_size": 8, "d_model": 256, "n_layers": LAYERS, "blocks": [[swa, "swiglu"]]})
    weight = sublayer_list(Decoder.build(config))[0].mixer.output.weight
    assert float(weight.detach().std()) == pytest.approx(0.5 / math.sqrt(256) / math.sqrt(2 * LAYERS), rel=0.02)


def test_inside_a_sublayer_no_depth_scales_the_output() -> None:
    mixer = LocalSWAConfig(n_heads=2, head_dim=4).build(16, toy_site(16))
    initialise(mixer, 0)
    declared = {name: declaration.init for name, _, declaration in declarations(mixer)}
    assert declared["output.weight"] == Normal(0.5 / math.sqrt(2 * 4))
    assert isinstance(mixer.output, torch.nn.Linear)
