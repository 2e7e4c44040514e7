"""The methods that a plan compares: every depth mixer as it is used at scale, and the local mixers of the sequence axis."""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import Any, Literal

from twoaxis.core.errors import ConfigError
from twoaxis.depth import DEPTH
from twoaxis.feed_forward import FEED_FORWARD
from twoaxis.local.places import PlacesConfig
from twoaxis.planner.model.part import OwnPart, Part
from twoaxis.planner.model.shape import ModelShape
from twoaxis.sequence import SEQUENCE, AttentionConfig
from twoaxis.sequence.heads import HeadsConfig

Axis = Literal["depth", "sequence", "both"]
Goal = Literal["control", "shortcut", "local-mixing", "both"]

WINDOW = 128
"""Tokens that a short window sees: the chunk size that the companion text Rethinking-SWA of the paper's author names."""

SOURCE_BLOCKS = 8
"""Blocks of sources that the report on Attention Residuals settles on, arXiv:2603.15031, section 5."""


@dataclass(frozen=True)
class Method:
    """One way to mix along depth or locally along positions, as an option for any model.

    Attributes:
        name: what it is called in plans.
        axis: on which it mixes.
        goal: what it is for; the residual stream is the control.
        kind: of the mixer in its table.
        apply: makes the model with it.
    """

    name: str
    axis: Axis
    goal: Goal
    kind: str
    apply: Callable[[ModelShape], ModelShape]


@dataclass(frozen=True)
class Refusal:
    """Why a method does not fit a model."""

    method: Method
    reason: str


def methods(window: int = WINDOW) -> tuple[Method, ...]:
    """Every method; the control comes first.

    Args:
        window: tokens that ShortSWA sees.
    """
    return (
        _depth("residual", "residual", goal="control"),
        _depth("residual scalars", "residual_scalars"),
        _depth("AttnRes full", "attention_residuals"),
        _depth("AttnRes blocks", "attention_residuals", lambda m: {"block_size": ceil(len(m.parts) / SOURCE_BLOCKS)}),
        _depth(
            "AttnRes blocks, two-phase",
            "attention_residuals",
            lambda m: {"block_size": ceil(len(m.parts) / SOURCE_BLOCKS), "schedule": "two_phase"},
        ),
        _depth("Delta AttnRes", "delta_attention_residuals"),
        _depth(
            "Delta AttnRes blocks", "delta_attention_residuals", lambda m: {"block_size": ceil(len(m.parts) / SOURCE_BLOCKS)}
        ),
        _depth("Depth ShortSWA", "depth_attention"),
        _depth("DCA k=1", "deep_cross_attention", k=1),
        _depth("DCA", "deep_cross_attention"),
        _depth("DDL", "deep_delta"),
        _depth("DDL CC", "deep_delta", value_channels=4, compressor="channel"),
        _depth("DDL TC", "deep_delta", value_channels=4, compressor="time"),
        _depth("DenseFormer 1x1", "denseformer"),
        _depth("DenseFormer 4x5", "denseformer", dilation=4, period=5),
        _depth("ELC-BERT", "elc_bert"),
        _depth("Frac-Connections", "frac_connections"),
        _depth("Hyper-Connections", "hyper_connections"),
        _depth("mHC", "mhc"),
        _depth("gated residual", "gated_residual", lambda m: {"rank": min(320, m.d_model)}),
        _depth("MUDDFormer", "muddformer"),
        _depth("Vertical Attention", "vertical_attention"),
        _depth("LAuReL", "laurel"),
        _depth("LAuReL of Gemma 3n", "laurel_gemma3n"),
        _depth("LIMe", "lime"),
        _depth("value residual", "value_residual"),
        Method(f"ShortSWA w={window}", "sequence", "local-mixing", "short_swa", lambda model: _short_swa(model, window)),
        Method("ShortConv", "sequence", "local-mixing", "short_conv", lambda m: m.with_sublayer(SEQUENCE.parse("short_conv"))),
        Method("Canon ABCD", "sequence", "local-mixing", "canon", lambda m: _canon(m, ("input_local", "projected_local"))),
        Method("Canon AC", "sequence", "local-mixing", "canon", lambda m: _canon(m, ("input_local",))),
        Method("KV shift", "sequence", "local-mixing", "kv_shift", _kv_shift),
    )


def together(depth: Method, local: Method) -> Method:
    """A depth mixer and a local mixer at once; sublayers that the local mixer adds are read and written as the others."""
    name, kind = f"{depth.name} + {local.name}", f"{depth.kind} + {local.kind}"
    return Method(name, "both", "both", kind, lambda model: depth.apply(local.apply(model)))


def fitted(method: Method, model: ModelShape) -> ModelShape | Refusal:
    """The model with this method, or why there is none."""
    try:
        return method.apply(model)
    except ConfigError as error:
        return Refusal(method, str(error))


def _depth(
    name: str,
    kind: str,
    options: Callable[[ModelShape], dict[str, Any]] = lambda model: {},
    goal: Goal = "shortcut",
    **fixed: Any,
) -> Method:
    return Method(
        name, "depth", goal, kind, lambda model: model.with_depth(DEPTH.parse({"kind": kind, **fixed, **options(model)}))
    )


def _short_swa(model: ModelShape, window: int) -> ModelShape:
    """With heads of 128 where the width allows, and one kv-head."""
    width = next(width for width in (128, 64, 32, 16, 8, 4, 2) if model.d_model % width == 0 or width == 2)
    data = {"kind": "short_swa", "window": window, "n_heads": max(1, model.d_model // width), "head_dim": width}
    return model.with_sublayer(SEQUENCE.parse(data))


def _canon(model: ModelShape, places: tuple[str, ...]) -> ModelShape:
    def mixed(part: Part) -> Part:
        if not isinstance(part, OwnPart) or not isinstance(part.config, PlacesConfig):
            raise ConfigError(
                f"Canon layers need attention and feed-forwards of this library; {part.kind!r} has no place for them"
            )
        table = SEQUENCE if part.config.kind in SEQUENCE else FEED_FORWARD
        return OwnPart(table.parse({**part.config.to_data(), **{place: {"kind": "canon"} for place in places}}))

    return model.with_parts(mixed)


def _kv_shift(model: ModelShape) -> ModelShape:
    """In place of every attention."""

    def shifted(part: Part) -> Part:
        if not isinstance(part, OwnPart) or not isinstance(part.config, AttentionConfig):
            return part
        shared = set(HeadsConfig.model_fields) | {"window"}
        options = {name: value for name, value in part.config.to_data().items() if name in shared and name != "kind"}
        return OwnPart(SEQUENCE.parse({"kind": "kv_shift", **options}))

    changed = model.with_parts(shifted)
    if changed.parts == model.parts:
        raise ConfigError("KV shift needs softmax attention of this library; this model has none")
    return changed
