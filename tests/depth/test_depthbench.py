"""The ten designs that DepthBench compares (arXiv:2609.32534) are arms: options of one model."""

from typing import Any

import pytest
import torch

from twoaxis.core.cost import Shape
from twoaxis.depth import DEPTH
from twoaxis.model import Decoder, DecoderConfig
from twoaxis.model.cost import decoder_cost
from twoaxis.testing.measured import gradients
from twoaxis.testing.toy import decoder_config, toy_decoder, toy_tokens

BLOCKS, SUBLAYERS = 24, 48

ARMS: dict[str, dict[str, Any]] = {
    "Pre-LN": {"kind": "norm_placement", "placement": "pre", "output_init": "plain"},
    "Peri-LN": {"kind": "norm_placement", "placement": "sandwich", "output_init": "plain"},
    "LNS": {"kind": "norm_placement", "placement": "layer_scaling"},
    "DeepNorm": {"kind": "norm_placement", "placement": "deepnorm"},
    "KEEL": {"kind": "norm_placement", "placement": "keel", "output_init": "plain"},
    "HC": {"kind": "hyper_connections", "preset": "depthbench", "n_streams": 4},
    "mHC": {"kind": "mhc", "preset": "depthbench", "n_streams": 4},
    "AttnRes full": {"kind": "attention_residuals"},
    "AttnRes blocks": {"kind": "attention_residuals", "block_size": SUBLAYERS // 8},
    "MoDA": {"kind": "mixture_of_depths_attention"},
}


def base(arm: str) -> DecoderConfig:
    """The base of its ladder: 24 blocks, width 1024, 400M parameters."""
    blocks = [[{"kind": "attention", "n_heads": 16}, {"kind": "swiglu", "d_ff": 2736}]]
    sizes = {"vocab_size": 50280, "d_model": 1024, "n_layers": BLOCKS, "tie_embeddings": False}
    return DecoderConfig.from_data({**sizes, "blocks": blocks, "depth": ARMS[arm]})


@pytest.mark.parametrize("arm", ARMS)
def test_an_arm_is_built_at_its_published_size(arm: str) -> None:
    config = base(arm)
    with torch.device("meta"):
        model = Decoder(config)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == decoder_cost(config, Shape(1, 1)).params
    # Keys and values of feed-forwards come on top in MoDA.
    slots = (BLOCKS - 1) * 2 * 1024 * 1024 if arm == "MoDA" else 0
    assert 0.97 * 405e6 < count - slots < 1.03 * 405e6


@pytest.mark.parametrize("arm", ARMS)
def test_an_arm_trains(arm: str) -> None:
    model = toy_decoder(DEPTH.parse(ARMS[arm]), perturbed=False, dtype=torch.float32, n_layers=8)
    loss, _ = model.loss(toy_tokens(), toy_tokens(seed=1))
    assert loss.isfinite()
    assert all(gradient.isfinite().all() for gradient in gradients(model, loss).values())


def test_norm_placements_start_alike_but_for_what_they_scale() -> None:
    """Arms with one seed draw the same matrices; DeepNorm's values, outputs and feed-forwards are smaller by one factor."""
    arms = {arm: ARMS[arm] for arm in ("Pre-LN", "Peri-LN", "LNS", "KEEL", "DeepNorm")}
    models = {arm: Decoder.build(decoder_config(DEPTH.parse(options))) for arm, options in arms.items()}
    plain, beta = models.pop("Pre-LN"), (8 * 3) ** -0.25
    for name, parameter in plain.named_parameters():
        if ".norm." not in name:
            for arm, model in models.items():
                other, factor = model.get_parameter(name), beta if arm == "DeepNorm" and "mixer" in name else 1.0
                rows = slice(-8, None) if name.endswith("qkv.weight") else slice(None)
                torch.testing.assert_close(other[rows], factor * parameter[rows], rtol=1e-5, atol=0)
