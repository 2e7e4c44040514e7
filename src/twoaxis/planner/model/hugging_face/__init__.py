"""Models from a Hugging Face `config.json`: families with a row are read as plain data, others are built.

The rows are families that our decoder covers, that transformers may not have, or whose residual mixers a count cannot find.
"""

import re
from collections.abc import Callable, Collection, Mapping, Set
from typing import Any, NamedTuple

from twoaxis.core.errors import ConfigError, nearest, problem
from twoaxis.model.config_json import refuse_architectures
from twoaxis.planner.model.hugging_face import deepseek, llama_family
from twoaxis.planner.model.hugging_face.deepseek import read_deepseek_v3, read_deepseek_v4, read_kimi_k3, read_kimi_linear
from twoaxis.planner.model.hugging_face.fields import Fields
from twoaxis.planner.model.hugging_face.llama_family import (
    read_llama,
    read_mistral,
    read_muddformer,
    read_qwen2,
    read_qwen3,
    read_qwen3_attnres,
)
from twoaxis.planner.model.published import read_published
from twoaxis.planner.model.shape import ModelShape

ROTATION = {"rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "original_max_position_embeddings"}
WITHOUT_COST = ROTATION | {"architectures", "quantization_config", "source"}
"""Keys of any family that change no count: rotations, the storage format, the source of the numbers, and the architecture,
which is checked separately."""

OF_K3 = deepseek.OF_PARTS | {f"text_config.{key}" for key in deepseek.OF_KIMI | WITHOUT_COST}


class Family(NamedTuple):
    """One family of models.

    Attributes:
        read: returns the model.
        architectures: names of its language model in files.
        known: keys that are not always read and change no count; keys of a table begin with its name and a dot.
    """

    read: Callable[[Fields, str], ModelShape]
    architectures: tuple[str, ...]
    known: Set[str] = frozenset()


FAMILIES: dict[str, Family] = {
    "deepseek_v3": Family(read_deepseek_v3, ("DeepseekV3ForCausalLM",), deepseek.KNOWN_V3),
    "deepseek_v4": Family(read_deepseek_v4, ("DeepseekV4ForCausalLM",), deepseek.KNOWN_V4),
    "kimi_k2": Family(read_deepseek_v3, ("DeepseekV3ForCausalLM", "KimiK2ForCausalLM"), deepseek.KNOWN_V3),
    "kimi_k3": Family(read_kimi_k3, ("KimiK3ForConditionalGeneration",), OF_K3),
    "kimi_linear": Family(read_kimi_linear, ("KimiLinearForCausalLM",), deepseek.OF_KIMI),
    "llama": Family(read_llama, ("LlamaForCausalLM", "LLaMAForCausalLM"), {"is_llama_config"}),
    "mistral": Family(read_mistral, ("MistralForCausalLM",)),
    "muddformer": Family(read_muddformer, ("MUDDFormer", "MUDDFormerForCausalLM"), llama_family.MUDDFORMER_KEYS),
    "muddpythia": Family(read_muddformer, ("MUDDPythia", "MUDDPythiaForCausalLM"), llama_family.MUDDFORMER_KEYS),
    "qwen2": Family(read_qwen2, ("Qwen2ForCausalLM",), llama_family.OF_QWEN),
    "qwen3": Family(read_qwen3, ("Qwen3ForCausalLM",), llama_family.OF_QWEN),
    "qwen3_attnres": Family(read_qwen3_attnres, ("Qwen3AttnResForCausalLM",), llama_family.OF_ATTNRES),
}
"""By `model_type`."""

OF_TEXT_ALONE = "save its text_config as a config.json of its own to plan the text decoder"

NOT_MODELLED = {
    "is_encoder_decoder": "an encoder is not modelled; plan a decoder-only model",
    "add_cross_attention": "attention to another sequence is not modelled; plan a decoder-only model",
    "cross_attention_layers": "attention to another sequence is not modelled; plan a decoder-only model",
    "text_config": f"a model of several parts is not modelled; {OF_TEXT_ALONE}",
    "vision_config": f"an image encoder is not modelled; {OF_TEXT_ALONE}",
    "audio_config": f"an audio encoder is not modelled; {OF_TEXT_ALONE}",
}
"""Keys that change the architecture of any family, with the message that refuses them."""

READ_BY_PARTS = ("kimi_k3",)
"""Families whose reader extracts the text decoder and names it in the name of the model."""

ALIKE = ("flava", "gpt_neo", "llava", "ministral", "mllama", "pixtral", "voxtral")
"""Other families whose names resemble ours and are no misspellings of them."""


def read_hugging_face(data: Mapping[str, Any], name: str) -> ModelShape:
    """Reads a model from the contents of its `config.json`.

    Families with a row: sizes that every model of a family has are required; every other key has the default of the family in
    transformers 5.24. Further keys must be known to change no count, or be empty. Other families: the installed transformers
    builds them on the meta device, with its own defaults; `not_counted` lists what is not counted.

    Args:
        data: the parsed file.
        name: of the model.

    Raises:
        ConfigError: in one line, for an unknown family, a missing or impossible value, an unread key, or an architecture that
            is not modelled; or transformers is needed and not installed.

    Example:
        >>> llama = {"model_type": "llama", "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128}
        >>> read_hugging_face(llama | {"num_hidden_layers": 2, "num_attention_heads": 4}, "tiny").n_layers
        2
    """
    fields, model_type = Fields(data), data.get("model_type")
    if model_type not in READ_BY_PARTS:
        for key, why in NOT_MODELLED.items():
            fields.refuse(key, why)
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        return read_published(data, name)
    family = FAMILIES[model_type]
    refuse_architectures(data, family.architectures)
    model = family.read(fields, name)
    fields.refuse_unread(family.known | WITHOUT_COST)
    return model


def known_type(data: Mapping[str, Any], known: Collection[str], remedy: str) -> str:
    """The `model_type` of a file.

    Args:
        data: the parsed file.
        known: the families that are read.
        remedy: for all others.

    Raises:
        ConfigError: another one; a known family is suggested where its name is misspelt.
    """
    found = data.get("model_type")
    if isinstance(found, str) and found in known:
        return found
    if isinstance(found, str) and found not in ALIKE:
        # A name with other digits or underscores is another family.
        shape = re.sub(r"[^\d_]", "", found)
        suggestion = nearest(found, [one for one in known if re.sub(r"[^\d_]", "", one) == shape])
        remedy = suggestion if suggestion.startswith("did you mean") else remedy
    raise ConfigError(problem("model_type", found, f"one of {', '.join(known)}; no other family is read", remedy))


__all__ = ["FAMILIES", "known_type", "read_hugging_face"]
