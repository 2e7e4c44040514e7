"""The configuration of a model with another depth mixer or more sequence mixers."""

from collections.abc import Mapping, Sequence
from typing import Any

from twoaxis.core.errors import ConfigError, nearest, problem
from twoaxis.depth import DEPTH
from twoaxis.model import DecoderConfig
from twoaxis.sequence import SEQUENCE
from twoaxis.sequence.heads import HeadsConfig

SUBLAYER_PRESETS: dict[str, Mapping[str, Any]] = {
    "short_swa": {"output_init": "zero"},
    "short_conv": {"taps_init": "zero"},
    "kv_shift": {"shift_init": "identity"},
    "ngram_embedding": {},
}
"""Options with which a sequence mixer starts as the plain model, by kind."""

LOCAL_PRESETS: dict[str, Mapping[str, Any]] = {
    "canon": {"taps_init": "zero"},
    "local_swa": {"output_init": "zero"},
    "branch_swa": {"activation": "none"},
}
"""Options with which a local mixer starts as the plain model, by kind."""

CANON_PLACES = {
    "A": ("attention", "input"),
    "B": ("attention", "projected"),
    "C": ("swiglu", "input"),
    "D": ("swiglu", "projected"),
}
"""Places of local mixers by the letters of the Canon paper: a sublayer, and its input or its projections."""

Options = Mapping[str, Any] | str
"""A bare kind, or a table with `kind`."""


def target_config(base: DecoderConfig, depth: Options | None = None, sequence: Sequence[Options] = ()) -> DecoderConfig:
    """The configuration of a model with added mixers, each with its preset.

    Args:
        base: of the model; with the plain residual, if `depth` is given.
        depth: the depth mixer, blended in if it cannot start as the plain model; None leaves the one of the model.
        sequence: mixers along positions. `short_swa`, `short_conv` and `ngram_embedding` become a sublayer before attention,
            `kv_shift` replaces attention, and `canon`, `local_swa` and `branch_swa` are added at `places`, by default ABCD, A
            and A.

    Raises:
        ConfigError: an unknown kind, options that do not fit, or a model that has a depth mixer already.

    Example:
        >>> base = DecoderConfig(vocab_size=8, d_model=16, n_layers=1)
        >>> [sublayer.kind for sublayer in target_config(base, "denseformer", ["short_swa"]).blocks[0]]
        ['short_swa', 'attention', 'swiglu']
    """
    blocks = [[sublayer.to_data() for sublayer in block] for block in base.blocks]
    for options in map(_table, sequence):
        blocks = [_with_sequence(block, options, base) for block in blocks]
    data = {**base.to_data(), "blocks": blocks}
    if depth is not None:
        if base.depth.kind != "residual":
            raise ConfigError(problem("depth", base.depth.kind, "'residual' in the model to begin with", "start from its base"))
        data["depth"] = _with_retrofit(_table(depth))
    return DecoderConfig.from_data(data)


def _with_retrofit(options: dict[str, Any]) -> dict[str, Any]:
    """The options of a depth mixer with the preset of its row, unless a variant has no use for an option of it."""
    preset = with_preset(options, {row.kind: row.retrofit for row in DEPTH})
    try:
        DEPTH.parse(preset)
    except ConfigError:
        return options
    return preset


def _table(options: Options) -> dict[str, Any]:
    if isinstance(options, str):
        return {"kind": options}
    if not isinstance(options, Mapping) or not isinstance(options.get("kind"), str):
        raise ConfigError(problem("mixer", options, "a kind, or a table with one", "write for example {kind='short_swa'}"))
    return dict(options)


def _with_sequence(block: list[dict[str, Any]], options: dict[str, Any], base: DecoderConfig) -> list[dict[str, Any]]:
    kind = options["kind"]
    at = next((index for index, sublayer in enumerate(block) if sublayer["kind"] == "attention"), None)
    if at is None:
        raise ConfigError(problem("blocks", [part["kind"] for part in block], "blocks with 'attention'", "add a depth mixer"))
    if kind in LOCAL_PRESETS:
        return _with_local(block, options)
    data = with_preset(options, SUBLAYER_PRESETS)
    if kind == "kv_shift":
        # The projections of attention are kept.
        shared = {name: block[at][name] for name in HeadsConfig.model_fields} | {"window": block[at]["window"]}
        return [*block[:at], {**shared, **data}, *block[at + 1 :]]
    if kind == "short_swa":
        n_heads = block[at]["n_heads"]
        data = {"n_heads": n_heads, "head_dim": block[at]["head_dim"] or base.d_model // n_heads, **data}
    elif kind not in ("short_conv", "ngram_embedding"):
        known = (*LOCAL_PRESETS, *SUBLAYER_PRESETS)
        raise ConfigError(f"sequence={kind!r}: must be one that leaves the model as it is; {nearest(kind, known)}")
    return [*block[:at], SEQUENCE.parse(data).to_data(), *block[at:]]


def _with_local(block: list[dict[str, Any]], options: dict[str, Any]) -> list[dict[str, Any]]:
    places = options.get("places", "ABCD" if options["kind"] == "canon" else "A")
    if not isinstance(places, str) or not places or not set(places) <= set(CANON_PLACES):
        raise ConfigError(problem("places", places, f"letters of {''.join(CANON_PLACES)}", "write for example 'AC'"))
    local = with_preset({name: value for name, value in options.items() if name != "places"}, LOCAL_PRESETS)
    found = [dict(sublayer) for sublayer in block]
    for letter in places:
        kind, place = CANON_PLACES[letter]
        fitting = [sublayer for sublayer in found if sublayer["kind"] == kind]
        if not fitting:
            got = [sublayer["kind"] for sublayer in block]
            raise ConfigError(problem("blocks", got, f"blocks with {kind!r} for place {letter}", "name other places"))
        for sublayer in fitting:
            sublayer[f"{place}_local"] = local
    return found


def why_blended(config: DecoderConfig) -> str | None:
    """The reason why the depth mixer is blended in; None if it is not.

    Example:
        >>> why_blended(target_config(DecoderConfig(vocab_size=8, d_model=16, n_layers=1), "deep_delta"))
        "it overwrites along the update's direction, so it is never the plain sum"
    """
    data = config.depth.to_data()
    if data.get("blend", "none") == "none":
        return None
    return DEPTH.parse({**data, "blend": "none"}).init_equivalence.reason


def start_of(config: DecoderConfig) -> tuple[str, str]:
    """How the model of a retrofit begins: `blended`, or its relation to the model before; and the reason.

    Example:
        >>> lns = {"kind": "norm_placement", "placement": "layer_scaling"}
        >>> start_of(target_config(DecoderConfig(vocab_size=8, d_model=16, n_layers=2), lns))[0]
        'exact'
    """
    if reason := why_blended(config):
        return "blended", reason
    if any(slot.norm_scale != 1 for slot in config.stack.slots):
        return "exact", "gains make up for the constant factors behind norms"
    claim = config.depth.init_equivalence
    return claim.relation, claim.reason


def with_preset(data: Mapping[str, Any], presets: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The options, with defaults from the preset of their kind.

    Example:
        >>> with_preset({"kind": "short_conv", "kernel": 3}, SUBLAYER_PRESETS)
        {'taps_init': 'zero', 'kind': 'short_conv', 'kernel': 3}
    """
    return {**presets.get(data.get("kind", ""), {}), **data}
