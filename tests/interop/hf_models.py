"""Small models away from their start, one for every sort of state that generation carries."""

from typing import Any

import torch

from twoaxis import Decoder, DecoderConfig

ATTENTION: dict[str, Any] = {"kind": "attention", "n_heads": 4, "n_kv_heads": 2}

MODELS: dict[str, dict[str, Any]] = {
    "plain": {"depth": "residual", "blocks": [[ATTENTION, "swiglu"]]},
    "windows": {
        "depth": "attention_residuals",
        "embedding_norm": "rms",
        "blocks": [[{"kind": "short_swa", "n_heads": 2, "window": 3}, ATTENTION, "swiglu"]],
    },
    "states": {
        "depth": {
            "kind": "deep_delta",
            "value_channels": 2,
            "compressor": "time",
            "expansion": "embedding_conv",
            "value_target": "code",
        },
        "blocks": [["gated_delta_net", "swiglu"], ["short_conv", "kv_shift", "swiglu"]],
    },
    "rewritten": {
        "depth": "residual",
        "blocks": [
            [{"kind": "path_attention", "n_kv_heads": 2, "qk_norm": "per_head", "forget_gate": "inside_scale"}, "swiglu"],
            [
                {**ATTENTION, "window": 3, "sink": "per_token", "bias": "all"},
                {"kind": "gated_delta_net", "projected_local": {"kind": "branch_swa", "window": 3, "window_kind": "chunk"}},
                "swiglu",
            ],
        ],
    },
    "ngrams": {
        "depth": "residual",
        "blocks": [
            [{"kind": "ngram_embedding", "rows": [53], "end_ids": [2]}, ATTENTION, "swiglu"],
            [{"kind": "ngram_embedding", "preset": "deepseek_v41", "rows": [41], "row_width": 3}, ATTENTION, "swiglu"],
        ],
    },
    "locals": {
        "embedding_local": {"kind": "smear", "gate_channels": 5},
        "blocks": [
            [
                {
                    **ATTENTION,
                    "qk_norm": "after_local",
                    "projected_local": {"kind": "dynamic_conv", "rank": 3},
                    "projected_branches": ["k", "v"],
                    "update_local": "canon",
                },
                {"kind": "swiglu", "input_local": "token_shift"},
            ],
            ["gated_short_conv", "swiglu"],
        ],
    },
    "views": {"depth": "muddformer", "blocks": [[ATTENTION, "swiglu"]]},
    "unnormed": {"depth": {"kind": "siamese_norm", "form": "hybrid_pre"}, "blocks": [[ATTENTION, "swiglu"]]},
    "tables": {
        "depth": {"kind": "per_layer_embedding", "d_embedding": 4, "stream": "value_embedding"},
        "blocks": [[ATTENTION, "swiglu"]],
    },
    "factors": {
        "depth": "residual",
        "blocks": [[{**ATTENTION, "head_dim": 4}, "swiglu"]],
        "parametrization": "completep",
        "base_d_model": 8,
        "base_n_layers": 1,
    },
    "streams": {"depth": "mhc", "blocks": [[ATTENTION, "swiglu"], ["gated_delta_net", "swiglu"]]},
}


def small_decoder(name: str, **changes: Any) -> Decoder:
    """A model in float64, so that orders of summation hardly show."""
    sizes = {"vocab_size": 40, "d_model": 16, "n_layers": 2, "max_seq_len": 128, "embedding_std": 0.02}
    decoder = Decoder.build(DecoderConfig(**{**sizes, **MODELS[name], **changes}), seed=0).double().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return decoder


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal up to the place of weights in memory: those of a loaded file lie where it is mapped, and with that some processors
    add up a product in another order."""
    rounding = torch.finfo(expected.dtype).eps
    torch.testing.assert_close(found, expected, rtol=1e3 * rounding, atol=1e2 * rounding)
