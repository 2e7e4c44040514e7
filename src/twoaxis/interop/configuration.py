"""Our configuration of a published model, from its `config.json`."""

from collections.abc import Mapping
from typing import Any

from twoaxis.core.errors import ConfigError, problem
from twoaxis.interop.rotation import with_rotation
from twoaxis.model import DecoderConfig
from twoaxis.model.config import SublayerConfig
from twoaxis.planner.model.hugging_face import FAMILIES, known_type, read_hugging_face
from twoaxis.planner.model.part import OwnPart, Part
from twoaxis.sequence import AttentionConfig

LAYOUT_OF_TYPE = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), "llama"),
    "muddformer": "muddformer",
    "qwen3_attnres": "attnres_qwen3",
}
"""The layout of the tensors, by `model_type`; SmolLM, SmolLM2 and many others are of type llama."""


def layout_of(data: Mapping[str, Any]) -> str:
    """The published layout of the tensors beside a `config.json`.

    Raises:
        ConfigError: a `model_type` that our decoder cannot be.
    """
    planned = "it can be planned, but is no model of this decoder; " if data.get("model_type") in tuple(FAMILIES) else ""
    return LAYOUT_OF_TYPE[known_type(data, LAYOUT_OF_TYPE, f"{planned}choose a model of such a type")]


def decoder_config(data: Mapping[str, Any]) -> DecoderConfig:
    """Our configuration, from the table of a `config.json`.

    Sizes and defaults are those that the planner counts by; whatever would change a logit and is not in our decoder is refused.

    Raises:
        ConfigError: naming the first thing that our decoder does not have.

    Example:
        >>> config = decoder_config({"model_type": "llama", "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2,
        ...     "num_attention_heads": 2, "intermediate_size": 24, "rms_norm_eps": 1e-5, "tie_word_embeddings": True})
        >>> config.norm_eps, config.blocks[0][1].d_ff
        (1e-05, 24)
    """
    # The planner reads more families than our decoder can be.
    layout_of(data)
    shape = read_hugging_face(data, "model")
    if data.get("quantization_config"):
        raise ConfigError("quantization_config: must be absent; choose the weights in float32, bfloat16 or float16")
    if shape.norm != "rms":
        raise ConfigError(problem("norm", shape.norm, "'rms', since our decoder has no other", "choose another model"))
    blocks = [tuple(_sublayer(part, data) for part in block) for block in shape.blocks]
    alike = all(block == blocks[0] for block in blocks)
    return DecoderConfig(
        vocab_size=shape.vocab_size,
        d_model=shape.d_model,
        n_layers=shape.n_layers,
        max_seq_len=shape.max_seq_len,
        norm_eps=shape.norm_eps,
        tie_embeddings=shape.tie_embeddings,
        depth=shape.depth,
        blocks=tuple(blocks[:1] if alike else blocks),
    )


def _sublayer(part: Part, data: Mapping[str, Any]) -> SublayerConfig:
    if type(part) is not OwnPart:
        got = f"{part.kind} with biases" if isinstance(part, OwnPart) else part.kind
        raise ConfigError(f"sublayer {got}: must be one that our decoder has; choose another model")
    return with_rotation(part.config, data) if isinstance(part.config, AttentionConfig) else part.config
