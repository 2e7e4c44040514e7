"""The `DecoderConfig` of a published model, from its `config.json`."""

import math
from collections.abc import Mapping
from typing import Any

from twoaxis.core.errors import ConfigError, problem
from twoaxis.model import DecoderConfig
from twoaxis.model.config import SublayerConfig
from twoaxis.planner.model.hugging_face import FAMILIES, known_type, read_hugging_face
from twoaxis.planner.model.hugging_face.fields import Fields
from twoaxis.planner.model.part import NativeSublayer, Part
from twoaxis.sequence import AttentionConfig

LAYOUT_OF_TYPE = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), "llama"),
    "muddformer": "muddformer",
    "qwen3_attnres": "attnres_qwen3",
}
"""The layout of the tensors, by `model_type`; SmolLM, SmolLM2 and many others are of type llama."""

LENGTH = "original_max_position_embeddings"
"""The key of the context length before scaling."""

SCALINGS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "beta_fast", "beta_slow", "attention_factor"),
}
"""Options with the same name here, by rope type."""

YARN = ("mscale", "mscale_all_dim", "truncate")
"""Keys of YaRN that are converted to other options."""

EVERYWHERE = ("rope_type", "type", "rope_theta", "partial_rotary_factor", LENGTH)
"""Keys of every rope type."""


def layout_of(data: Mapping[str, Any]) -> str:
    """The published layout of the tensors of a `config.json`.

    Raises:
        ConfigError: an unsupported `model_type`.
    """
    planned = "it can be planned, but is no model of this decoder; " if data.get("model_type") in tuple(FAMILIES) else ""
    return LAYOUT_OF_TYPE[known_type(data, LAYOUT_OF_TYPE, f"{planned}choose a model of such a type")]


def decoder_config(data: Mapping[str, Any]) -> DecoderConfig:
    """Converts the table of a `config.json` to our configuration.

    Sizes and defaults are those of the planner. Anything that would change a logit and is not supported is refused.

    Raises:
        ConfigError: the first feature that our decoder does not have.

    Example:
        >>> config = decoder_config({"model_type": "llama", "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2,
        ...     "num_attention_heads": 2, "intermediate_size": 24, "rms_norm_eps": 1e-5, "tie_word_embeddings": True})
        >>> config.norm_eps, config.blocks[0][1].d_ff
        (1e-05, 24)
    """
    # The planner reads more families than our decoder supports.
    layout_of(data)
    shape = read_hugging_face(data, "model")
    if data.get("quantization_config"):
        raise ConfigError("quantization_config: must be absent; choose the weights in float32, bfloat16 or float16")
    if shape.norm != "rms":
        raise ConfigError(problem("norm", shape.norm, "'rms', since our decoder has no other", "choose another model"))
    blocks = [tuple(_sublayer(part, data) for part in block) for block in shape.blocks]
    equal = all(block == blocks[0] for block in blocks)
    return DecoderConfig(
        vocab_size=shape.vocab_size,
        d_model=shape.d_model,
        n_layers=shape.n_layers,
        max_seq_len=shape.max_seq_len,
        norm_eps=shape.norm_eps,
        tie_embeddings=shape.tie_embeddings,
        depth=shape.depth,
        blocks=tuple(blocks[:1] if equal else blocks),
    )


def _sublayer(part: Part, data: Mapping[str, Any]) -> SublayerConfig:
    if type(part) is not NativeSublayer:
        got = f"{part.kind} with biases" if isinstance(part, NativeSublayer) else part.kind
        raise ConfigError(f"sublayer {got}: must be one that our decoder has; choose another model")
    return with_rotation(part.config, data) if isinstance(part.config, AttentionConfig) else part.config


def with_rotation(attention: AttentionConfig, data: Mapping[str, Any]) -> AttentionConfig:
    """Returns the attention with the rotation of a `config.json`: from `rope_parameters`, or from the older keys.

    Raises:
        ConfigError: an unsupported scaling.

    Example:
        >>> llama = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 5e5}
        >>> with_rotation(AttentionConfig(), llama).rope_scaling.factor
        2.0
    """
    fields = Fields(data)
    new, old = fields.table("rope_parameters"), fields.table("rope_scaling")
    if new.data and old.data and new.data != old.data:
        # Transformers takes the older key and drops the base of the newer one.
        raise ConfigError("rope_scaling: must be left out with rope_parameters; move its keys into rope_parameters")
    table = new if new.data else old
    if any(isinstance(value, Mapping) for value in table.data.values()):
        raise ConfigError(f"{table.where[:-1]}: has a table for each type of layer: must be one for all; choose another model")
    # The table takes precedence; `rope_base` is the key in MUDDFormer.
    given = Fields({"rope_theta": data.get("rope_theta") or data.get("rope_base"), **_given(data), **_given(table.data)})
    if given.number("partial_rotary_factor", 1.0) != 1:
        got = given.data["partial_rotary_factor"]
        raise ConfigError(problem("partial_rotary_factor", got, "1, since this model_type rotates whole heads", "remove it"))
    return attention.replace(rope_theta=given.number("rope_theta", 10_000.0), rope_scaling=_scaling(table, fields))


def _scaling(table: Fields, fields: Fields) -> dict[str, Any] | None:
    """The options of our rope scaling."""
    given = _given(table.data)
    kind = given.get("rope_type") or given.get("type") or "default"
    if not isinstance(kind, str) or kind not in ("default", *SCALINGS):
        raise ConfigError(problem("rope type", kind, f"default or one of {', '.join(SCALINGS)}", "choose another model"))
    known = (*EVERYWHERE, *SCALINGS.get(kind, ()), *(YARN if kind == "yarn" else ()))
    for name in given:
        if name not in known:
            allowed = f"one of {', '.join(known)} in rope type {kind!r}"
            raise ConfigError(problem(table.where + name, given[name], allowed, "choose another model"))
    if kind == "default":
        return None
    options = {name: given[name] for name in SCALINGS[kind] if name in given}
    if kind != "linear":
        # As in transformers: next to the table, in it, or the context length of the model.
        place = fields if fields.has(LENGTH) else table
        options["original_max_seq_len"] = place.size(LENGTH, default=fields.data.get("max_position_embeddings"))
    if kind == "yarn":
        options = {**_yarn(table, fields, options["original_max_seq_len"]), **options}
    return {"kind": kind, **options}


def _yarn(table: Fields, fields: Fields, original: int) -> dict[str, Any]:
    """YaRN options that follow from other keys."""
    factor = table.number("factor", fields.size("max_position_embeddings", default=original) / original)
    found: dict[str, Any] = {"factor": factor, "bounds": "whole" if table.flag("truncate", True) else "exact"}
    if table.has("mscale") and table.has("mscale_all_dim"):
        over, under = (0.1 * table.number(name, 1.0) * math.log(factor) + 1 for name in ("mscale", "mscale_all_dim"))
        found["attention_factor"] = over / under
    return found


def _given(data: Mapping[str, Any]) -> dict[str, Any]:
    """The entries that are not null."""
    return {name: value for name, value in data.items() if value is not None}
