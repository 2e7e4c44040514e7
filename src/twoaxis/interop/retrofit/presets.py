"""Options with which each method starts as the plain model, where it can."""

from collections.abc import Mapping
from typing import Any

DEPTH_PRESETS: dict[str, Mapping[str, Any]] = {
    "attention_residuals": {"mixture": "sum"},
    "delta_attention_residuals": {"gate": "alpha"},
    "lime": {"init": "plain"},
    "value_residual": {"first": 0.0, "own": 1.0},
    "vertical_attention": {"skip": "gated"},
}
"""By kind; mixers that are not named start as the plain model with their defaults, or never do."""

BLENDS: dict[str, Mapping[str, Any]] = {
    "deep_delta": {"blend": "annealed"},
    "elc_bert": {"variant": "weighted_output", "blend": "annealed"},
}
"""Mixers that never start as the plain model, and the options with which they are blended in."""

SUBLAYER_PRESETS: dict[str, Mapping[str, Any]] = {
    "short_swa": {"output_init": "zero"},
    "short_conv": {"taps_init": "zero"},
    "kv_shift": {"shift_init": "identity"},
}
"""Sequence mixers by kind."""

LOCAL_PRESETS: dict[str, Mapping[str, Any]] = {"canon": {"taps_init": "zero"}, "local_swa": {"output_init": "zero"}}
"""Local mixers by kind."""

CANON_PLACES = {
    "A": ("attention", "input"),
    "B": ("attention", "projected"),
    "C": ("swiglu", "input"),
    "D": ("swiglu", "projected"),
}
"""The places of local mixers in a block, by the letters of the Canon paper: a sublayer, and its input or its projections."""


def with_preset(data: Mapping[str, Any], presets: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The options over those of the preset of their kind.

    Example:
        >>> with_preset({"kind": "short_conv", "kernel": 3}, SUBLAYER_PRESETS)
        {'taps_init': 'zero', 'kind': 'short_conv', 'kernel': 3}
    """
    return {**presets.get(data.get("kind", ""), {}), **data}
