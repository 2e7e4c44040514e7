"""The layouts of published checkpoints, one row each: their names of our parameters."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from twoaxis.checkpoints.layouts import attention_residuals, deep_delta, denseformer, gemma, llama, mhc, muddformer
from twoaxis.checkpoints.layouts.state_map import DepthPaths, StateMap, depth_paths, sublayer_paths
from twoaxis.core.errors import ConfigError, nearest, problem
from twoaxis.model import Decoder, DecoderConfig


class Layout(NamedTuple):
    """One row: a published layout.

    Attributes:
        summary: its source, in one line.
        decoder: builds the map of a whole decoder; None if other parts of the model are not supported.
        mixers: builds the map of the depth mixers alone.
    """

    summary: str
    decoder: Callable[[DecoderConfig], StateMap] | None = None
    mixers: Callable[[DepthPaths], StateMap] | None = None


LAYOUTS: dict[str, Layout] = {
    "llama": Layout("Hugging Face folders of Llama, SmolLM2, Mistral, Qwen2 and Qwen3", llama.llama),
    "deep_delta": Layout("the repository of Deep Delta Learning", deep_delta.deep_delta),
    "attnres_fla": Layout("Attention Residuals in flash-linear-attention", attention_residuals.attnres_fla),
    "attnres_qwen3": Layout("Attention Residuals on Qwen3 (wdlctc)", attention_residuals.attnres_qwen3),
    "kimi_k3": Layout("the depth reads of Kimi K3", mixers=attention_residuals.kimi_k3),
    "inkling2": Layout("the depth reads of Inkling-2 in transformers", mixers=attention_residuals.inkling2),
    "inkling2_text": Layout("the same in a model of text alone", mixers=attention_residuals.inkling2_text),
    "muddformer": Layout("MUDDFormer-2.8B", muddformer.muddformer),
    "muddformer_sums": Layout("the sums of MUDDFormer and MUDDPythia", mixers=muddformer.muddformer_sums),
    "denseformer": Layout("the package of DenseFormer", mixers=denseformer.denseformer),
    "denseformer_training": Layout("the training code of DenseFormer", mixers=denseformer.denseformer_training),
    "connect_to_last": Layout("a baseline of DenseFormer's training code", mixers=denseformer.connect_to_last),
    "skip_gains": Layout("another baseline of DenseFormer's training code", mixers=denseformer.skip_gains),
    "gpt_bert": Layout("the rows of GPT-BERT after every sublayer", mixers=denseformer.gpt_bert),
    "elc_bert": Layout("the logits of ELC-BERT", mixers=denseformer.elc_bert),
    "deepseek_v4": Layout("the streams of DeepSeek-V4 in transformers", mixers=mhc.deepseek_v4),
    "gemma4": Layout("the per-layer embeddings of Gemma 4 in transformers", mixers=gemma.gemma4),
    "gemma4_text": Layout("the same in a model of text alone", mixers=gemma.gemma4_text),
    "deepseek_v4_raw": Layout("the streams of DeepSeek-V4 in its own files", mixers=mhc.deepseek_v4_raw),
    "deepseek_v41": Layout("the streams of DeepSeek-V4.1 in its own files", mixers=mhc.deepseek_v41),
}
"""The published layouts by name."""


def state_map(layout: str, config: DecoderConfig) -> StateMap:
    """The map between a decoder and a published layout.

    Raises:
        ConfigError: an unknown layout, or a decoder with parameters or multipliers that it lacks.

    Example:
        >>> config = DecoderConfig(vocab_size=8, d_model=8, n_layers=1)
        >>> state_map("llama", config).names()["blocks.0.swiglu.mixer.down.weight"]
        ('model.layers.0.mlp.down_proj.weight',)
    """
    if layout not in LAYOUTS:
        raise ConfigError(f"unknown layout {layout!r}; {nearest(layout, LAYOUTS)}")
    if config.parametrization != "standard":
        allowed = f"'standard' in layout {layout!r}, which has no multipliers"
        raise ConfigError(problem("parametrization", config.parametrization, allowed, "keep our own format"))
    row = LAYOUTS[layout]
    if row.decoder is None:
        assert row.mixers is not None
        return row.mixers(depth_paths(config))
    found = row.decoder(config)
    with torch.device("meta"):
        ours = [name for name, _ in Decoder(config).named_parameters()]
    named = set(found.names())
    assert named <= set(ours), f"layout {layout!r} names parameters that the decoder does not have"
    if missing := [name for name in ours if name not in named]:
        lacks = f"has no place for parameter {missing[0]!r} (and {len(missing) - 1} more)"
        raise ConfigError(f"layout {layout!r}: {lacks}: must have one for all; use another layout, or keep our own format")
    return found


__all__ = ["LAYOUTS", "DepthPaths", "Layout", "StateMap", "state_map", "sublayer_paths"]
