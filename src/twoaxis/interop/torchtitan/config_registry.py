"""Runs that torchtitan finds by name: `--module twoaxis.interop.torchtitan --config recommended_block`."""

from typing import Any

from twoaxis.interop.torchtitan.runs import trainer_config
from twoaxis.model import DecoderConfig

SIZES: dict[str, Any] = {"vocab_size": 2048, "d_model": 256, "n_layers": 6, "max_seq_len": 2048}
"""A model that fits everywhere, for torchtitan's own small tokenizer."""


def plain() -> Any:
    """Attention, SwiGLU and the residual stream."""
    return trainer_config(DecoderConfig.from_data(SIZES))


def recommended_block() -> Any:
    """ShortSWA before attention in every block."""
    return trainer_config(DecoderConfig.from_data({**SIZES, "blocks": [["short_swa", "attention", "swiglu"]]}))


def deep_delta() -> Any:
    """Deep Delta Learning in the place of the residual stream."""
    return trainer_config(DecoderConfig.from_data({**SIZES, "depth": "deep_delta"}))
