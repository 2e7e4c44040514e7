"""Small decoders away from their initial values, since zeros and ones hide mistakes."""

from typing import Any

import torch
from torch import Tensor

from twoaxis import Decoder, DecoderConfig

VOCABULARY = 19
DEPTHS: list[Any] = [
    "residual",
    "residual_scalars",
    "attention_residuals",
    {"kind": "attention_residuals", "block_size": 3},
    "deep_delta",
]
FULL = {"kind": "attention", "n_heads": 2, "n_kv_heads": 1, "qk_norm": "before_rope"}
WINDOW = {"kind": "attention", "n_heads": 2, "window": 4}
SHORT = {"kind": "short_swa", "n_heads": 2, "window": 4}
MIXED = [[SHORT, FULL, "swiglu"], [WINDOW, {"kind": "gelu", "d_ff": 8}]]
MODELS: list[Any] = [
    {"depth": {"kind": "attention_residuals", "block_size": 3}, "blocks": MIXED},
    {"depth": "deep_delta", "n_layers": 1, "blocks": [[FULL, "swiglu"]]},
    {"n_layers": 1, "blocks": [[{**WINDOW, "window": 1}, "swiglu"]]},
]
NAMES = ["mixed", "full", "window of 1"]


def decoder(seed: int = 0, **changes: Any) -> Decoder:
    """A float64 decoder with every parameter moved by seeded noise."""
    data = {"vocab_size": VOCABULARY, "d_model": 8, "n_layers": 2, "blocks": MIXED, "max_seq_len": 512, **changes}
    model = Decoder.build(DecoderConfig.from_data(data), seed).double()
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64), alpha=0.3)
    return model


def tokens(*shape: int, seed: int = 0) -> Tensor:
    """Random token ids."""
    return torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def same(ours: Tensor, theirs: Tensor) -> None:
    """Equal up to the rounding of another order of summation."""
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
