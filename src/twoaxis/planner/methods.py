"""The methods that a plan compares: depth mixers in the forms used at scale, and local mixers of the sequence axis."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from twoaxis.core.errors import ConfigError
from twoaxis.core.position import LayerStack
from twoaxis.depth import DEPTH
from twoaxis.feed_forward import FEED_FORWARD
from twoaxis.local.places import PlacesConfig
from twoaxis.planner.model.part import NativeSublayer, Part
from twoaxis.planner.model.shape import ModelShape
from twoaxis.sequence import SEQUENCE, AttentionConfig
from twoaxis.sequence.heads import HeadsConfig

Axis = Literal["depth", "sequence", "both"]
Goal = Literal["control", "shortcut", "local-mixing", "both"]

WINDOW = 128
"""Tokens that a short window sees: the chunk size that the companion text Rethinking-SWA of the paper's author names."""


@dataclass(frozen=True)
class Method:
    """One way to mix along depth or locally along positions, as an option for any model.

    Attributes:
        name: in plans.
        axis: on which it mixes.
        goal: what it is for; the residual stream is the control.
        kind: of its mixer.
        apply: returns the model with the method.
    """

    name: str
    axis: Axis
    goal: Goal
    kind: str
    apply: Callable[[ModelShape], ModelShape]


@dataclass(frozen=True)
class Refusal:
    """A method that does not fit a model, and the reason."""

    method: Method
    reason: str


def methods(window: int = WINDOW) -> tuple[Method, ...]:
    """Every method; the control comes first.

    Args:
        window: tokens that ShortSWA sees.
    """
    return (
        *_depth_methods(),
        Method(f"ShortSWA w={window}", "sequence", "local-mixing", "short_swa", lambda model: _short_swa(model, window)),
        Method("ShortConv", "sequence", "local-mixing", "short_conv", lambda m: m.with_sublayer(SEQUENCE.parse("short_conv"))),
        Method("Canon ABCD", "sequence", "local-mixing", "canon", lambda m: _canon(m, ("input_local", "projected_local"))),
        Method("Canon AC", "sequence", "local-mixing", "canon", lambda m: _canon(m, ("input_local",))),
        Method("KV shift", "sequence", "local-mixing", "kv_shift", _kv_shift),
    )


def together(depth: Method, local: Method) -> Method:
    """Combines a depth mixer and a local mixer; added sublayers read and write the depth state as the others do."""
    name, kind = f"{depth.name} + {local.name}", f"{depth.kind} + {local.kind}"
    return Method(name, "both", "both", kind, lambda model: depth.apply(local.apply(model)))


def fitted(method: Method, model: ModelShape) -> ModelShape | Refusal:
    """The model with this method, or the reason why it does not fit."""
    try:
        return method.apply(model)
    except ConfigError as error:
        return Refusal(method, str(error))


def _depth_methods() -> Iterator[Method]:
    """The forms of every depth mixer at scale, from its row."""
    for row in DEPTH:
        goal: Goal = "control" if row.kind == "residual" else "shortcut"
        for name, options in (row.at_scale or {row.kind.replace("_", " "): {}}).items():
            yield Method(name, "depth", goal, row.kind, partial(_with_depth, kind=row.kind, options=options))


def _with_depth(
    model: ModelShape, kind: str, options: Mapping[str, Any] | Callable[[LayerStack], Mapping[str, Any]]
) -> ModelShape:
    if callable(options):
        options = options(LayerStack(model.d_model, model.norm_eps, tuple(map(len, model.blocks))))
    return model.with_depth(DEPTH.parse({"kind": kind, **options}))


def _short_swa(model: ModelShape, window: int) -> ModelShape:
    """Adds ShortSWA with one kv-head and heads of 128 channels, or fewer if they do not divide the width."""
    width = next(width for width in (128, 64, 32, 16, 8, 4, 2) if model.d_model % width == 0 or width == 2)
    data = {"kind": "short_swa", "window": window, "n_heads": max(1, model.d_model // width), "head_dim": width}
    return model.with_sublayer(SEQUENCE.parse(data))


def _canon(model: ModelShape, places: tuple[str, ...]) -> ModelShape:
    def mixed(part: Part) -> Part:
        if not isinstance(part, NativeSublayer) or not isinstance(part.config, PlacesConfig):
            raise ConfigError(
                f"Canon layers need attention and feed-forwards of this library; {part.kind!r} has no place for them"
            )
        table = SEQUENCE if part.config.kind in SEQUENCE else FEED_FORWARD
        return NativeSublayer(table.parse({**part.config.to_data(), **{place: {"kind": "canon"} for place in places}}))

    return model.with_parts(mixed)


def _kv_shift(model: ModelShape) -> ModelShape:
    """Replaces every attention."""

    def shifted(part: Part) -> Part:
        if not isinstance(part, NativeSublayer) or not isinstance(part.config, AttentionConfig):
            return part
        shared = set(HeadsConfig.model_fields) | {"window"}
        options = {name: value for name, value in part.config.to_data().items() if name in shared and name != "kind"}
        return NativeSublayer(SEQUENCE.parse({"kind": "kv_shift", **options}))

    changed = model.with_parts(shifted)
    if changed.parts == model.parts:
        raise ConfigError("KV shift needs softmax attention of this library; this model has none")
    return changed
