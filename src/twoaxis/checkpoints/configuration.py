"""The `DecoderConfig` of a published model, from its `config.json`."""

import math
from collections.abc import Mapping
from typing import Any

from twoaxis.core.errors import ConfigError, problem
from twoaxis.model import DecoderConfig
from twoaxis.model.config import SublayerConfig
from twoaxis.planner.model.hugging_face import FAMILIES, known_type, read_hugging_face
from twoaxis.planner.model.hugging_face.fields import Fields
from twoaxis.planner.model.part import OwnPart, Part
from twoaxis.sequence import AttentionConfig

LAYOUT_OF_TYPE = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), "llama"),
    "muddformer": "muddformer",
    "qwen3_attnres": "attnres_qwen3",
}
"""The layout of the tensors, by `model_type`; SmolLM, SmolLM2 and many others are of type llama."""

LENGTH = "original_max_position_embeddings"
"""Tokens of the first training."""

SCALINGS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "beta_fast", "beta_slow", "attention_factor"),
}
"""Options that are called the same here, by type."""

YARN = ("mscale", "mscale_all_dim", "truncate")
"""Keys of YaRN from which options of ours follow."""

EVERYWHERE = ("rope_type", "type", "rope_theta", "partial_rotary_factor", LENGTH)
"""Keys of every type."""


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


def with_rotation(attention: AttentionConfig, data: Mapping[str, Any]) -> AttentionConfig:
    """The attention with the rotation of a `config.json`: from `rope_parameters`, or from the older keys.

    Raises:
        ConfigError: angles that are scaled in a way that our decoder does not have.

    Example:
        >>> llama = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 5e5}
        >>> with_rotation(AttentionConfig(), llama).rope_scaling.factor
        2.0
    """
    fields = Fields(data)
    new, old = fields.table("rope_parameters"), fields.table("rope_scaling")
    if new.data and old.data and new.data != old.data:
        # Transformers takes the older key and forgets the base that the newer one has.
        raise ConfigError("rope_scaling: must be left out beside rope_parameters; move what it says into rope_parameters")
    table = new if new.data else old
    if any(isinstance(value, Mapping) for value in table.data.values()):
        raise ConfigError(f"{table.where[:-1]}: has a table for each type of layer: must be one for all; choose another model")
    # The table comes first; `rope_base` is the name in MUDDFormer.
    given = Fields({"rope_theta": data.get("rope_theta") or data.get("rope_base"), **_given(data), **_given(table.data)})
    if given.number("partial_rotary_factor", 1.0) != 1:
        got = given.data["partial_rotary_factor"]
        raise ConfigError(problem("partial_rotary_factor", got, "1, since this model_type rotates whole heads", "remove it"))
    return attention.replace(rope_theta=given.number("rope_theta", 10_000.0), rope_scaling=_scaling(table, fields))


def _scaling(table: Fields, fields: Fields) -> dict[str, Any] | None:
    """Our options of the scaling."""
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
        # As in transformers: beside the table, in it, or what the model is trained to.
        place = fields if fields.has(LENGTH) else table
        options["original_max_seq_len"] = place.size(LENGTH, default=fields.data.get("max_position_embeddings"))
    if kind == "yarn":
        options = {**_yarn(table, fields, options["original_max_seq_len"]), **options}
    return {"kind": kind, **options}


def _yarn(table: Fields, fields: Fields, original: int) -> dict[str, Any]:
    """What follows from other keys, where the file does not say it."""
    factor = table.number("factor", fields.size("max_position_embeddings", default=original) / original)
    found: dict[str, Any] = {"factor": factor, "bounds": "whole" if table.flag("truncate", True) else "exact"}
    if table.has("mscale") and table.has("mscale_all_dim"):
        over, under = (0.1 * table.number(name, 1.0) * math.log(factor) + 1 for name in ("mscale", "mscale_all_dim"))
        found["attention_factor"] = over / under
    return found


def _given(data: Mapping[str, Any]) -> dict[str, Any]:
    """What is there and not null."""
    return {name: value for name, value in data.items() if value is not None}
