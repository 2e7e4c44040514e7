"""Models by their Hugging Face `config.json`, read as plain data. One file and one row per family."""

from collections.abc import Callable, Mapping
from typing import Any

from twoaxis.core.errors import ConfigError, nearest
from twoaxis.planner.model.hugging_face.deepseek_v3 import read_deepseek_v2, read_deepseek_v3
from twoaxis.planner.model.hugging_face.deepseek_v4 import read_deepseek_v4
from twoaxis.planner.model.hugging_face.fields import Fields
from twoaxis.planner.model.hugging_face.gpt_neox import read_gpt_neox
from twoaxis.planner.model.hugging_face.kimi_linear import read_kimi_k3, read_kimi_linear
from twoaxis.planner.model.hugging_face.llama import read_llama
from twoaxis.planner.model.hugging_face.mistral import read_mistral, read_mixtral
from twoaxis.planner.model.hugging_face.muddformer import read_muddformer
from twoaxis.planner.model.hugging_face.qwen import (
    read_qwen2,
    read_qwen2_moe,
    read_qwen3,
    read_qwen3_attnres,
    read_qwen3_moe,
)
from twoaxis.planner.model.shape import ModelShape

Reader = Callable[[Fields, str], ModelShape]

READERS: dict[str, Reader] = {
    "deepseek_v2": read_deepseek_v2,
    "deepseek_v3": read_deepseek_v3,
    "deepseek_v4": read_deepseek_v4,
    "gpt_neox": read_gpt_neox,
    "kimi_k2": read_deepseek_v3,
    "kimi_k3": read_kimi_k3,
    "kimi_linear": read_kimi_linear,
    "llama": read_llama,
    "mistral": read_mistral,
    "mixtral": read_mixtral,
    "muddformer": read_muddformer,
    "muddpythia": read_muddformer,
    "qwen2": read_qwen2,
    "qwen2_moe": read_qwen2_moe,
    "qwen3": read_qwen3,
    "qwen3_attnres": read_qwen3_attnres,
    "qwen3_moe": read_qwen3_moe,
}

OF_TEXT_ALONE = "save its text_config as a config.json of its own to plan the text decoder"

NOT_MODELLED = {
    "is_encoder_decoder": "an encoder beside the decoder is not modelled; plan a decoder-only model",
    "add_cross_attention": "attention to another sequence is not modelled; plan a decoder-only model",
    "cross_attention_layers": "attention to another sequence is not modelled; plan a decoder-only model",
    "text_config": f"a model of several parts is not modelled; {OF_TEXT_ALONE}",
    "vision_config": f"an image encoder is not modelled; {OF_TEXT_ALONE}",
    "audio_config": f"an audio encoder is not modelled; {OF_TEXT_ALONE}",
}
"""What changes the architecture of any family."""

READ_BY_PARTS = ("kimi_k3",)
"""Families whose reader takes the text decoder out of its parts and says so in the name."""


def read_hugging_face(data: Mapping[str, Any], name: str) -> ModelShape:
    """Reads a model from the contents of its `config.json`.

    Sizes that no model of a family is without must be there; every other key has the default of the family in transformers
    5.24. Further keys are ignored, since such files hold many that have nothing to do with the architecture, except those that
    ask for what is not modelled.

    Args:
        data: the parsed file.
        name: what the model is called.

    Raises:
        ConfigError: in one line, for an unknown family, a missing or impossible value, or an architecture that is not modelled.

    Example:
        >>> llama = {"model_type": "llama", "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128}
        >>> read_hugging_face(llama | {"num_hidden_layers": 2, "num_attention_heads": 4}, "tiny").n_layers
        2
    """
    fields, model_type = Fields(data), data.get("model_type")
    if not isinstance(model_type, str) or model_type not in READERS:
        raise ConfigError(f"unknown model_type {model_type!r}; {nearest(str(model_type), READERS)}")
    if model_type not in READ_BY_PARTS:
        for key, why in NOT_MODELLED.items():
            fields.refuse(key, why)
    return READERS[model_type](fields, name)


__all__ = ["READERS", "read_hugging_face"]
