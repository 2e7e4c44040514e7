"""The rotation of a published model, from its `config.json`."""

import math
from collections.abc import Mapping
from typing import Any

from twoaxis.core.errors import ConfigError, problem
from twoaxis.planner.model.hugging_face.fields import Fields
from twoaxis.sequence import AttentionConfig

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
