"""The configuration of a model with another depth mixer or more sequence mixers."""

from collections.abc import Mapping, Sequence
from typing import Any

from twoaxis.core.errors import ConfigError, nearest, problem
from twoaxis.depth import DEPTH
from twoaxis.local import LOCAL
from twoaxis.model import DecoderConfig
from twoaxis.sequence import SEQUENCE
from twoaxis.sequence.heads import HeadsConfig

SUBLAYER_PRESETS: dict[str, Mapping[str, Any]] = {
    "short_swa": {"output_init": "zero"},
    "short_conv": {"taps_init": "zero"},
    "gated_short_conv": {"output_init": "zero"},
    "kv_shift": {"shift_init": "identity"},
    "ngram_embedding": {},
}
"""Options with which a sequence mixer starts as the plain model, by kind."""

LOCAL_PLACES = {
    "A": ("attention", "input"),
    "B": ("attention", "projected"),
    "C": ("swiglu", "input"),
    "D": ("swiglu", "projected"),
    "E": ("decoder", "embedding"),
    "F": ("attention", "update"),
    "G": ("swiglu", "update"),
}
"""Places of local mixers by letter, the first four those of the Canon paper: what has the place, and which one."""

USUAL_PLACES = {"canon": "ABCD", "dynamic_conv": "B", "token_shift": "AC", "smear": "E"}
"""The places by kind if none are given; A for other kinds."""

Options = Mapping[str, Any] | str
"""A bare kind, or a table with `kind`."""


def target_config(base: DecoderConfig, depth: Options | None = None, sequence: Sequence[Options] = ()) -> DecoderConfig:
    """The configuration of a model with added mixers, each with its preset.

    Args:
        base: of the model; with the plain residual, if `depth` is given.
        depth: the depth mixer, blended in if it cannot start as the plain model; None leaves the one of the model.
        sequence: mixers along positions. `short_swa`, `short_conv`, `gated_short_conv` and `ngram_embedding` become a sublayer
            before attention, `kv_shift` replaces attention, and local mixers are added at `places`: ABCD as in the Canon paper,
            E behind the embedding, F and G at the updates of attention and feed-forward; by default ABCD for `canon`, B for
            `dynamic_conv`, AC for `token_shift`, E for `smear`, and A for `local_swa` and `branch_swa`.

    Raises:
        ConfigError: an unknown kind, options that do not fit, a place that is taken, or a model that has a depth mixer already.

    Example:
        >>> base = DecoderConfig(vocab_size=8, d_model=16, n_layers=1)
        >>> [sublayer.kind for sublayer in target_config(base, "denseformer", ["short_swa"]).blocks[0]]
        ['short_swa', 'attention', 'swiglu']
    """
    data = base.to_data()
    for options in map(_table, sequence):
        blocks = [_with_sequence(block, options, base) for block in data["blocks"]]
        data = (
            {**data, "blocks": blocks} if options["kind"] not in LOCAL else _with_embedding({**data, "blocks": blocks}, options)
        )
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
    if kind in LOCAL:
        return _with_local(block, options)
    data = with_preset(options, SUBLAYER_PRESETS)
    if kind == "kv_shift":
        # The projections of attention are kept.
        shared = {name: block[at][name] for name in HeadsConfig.model_fields} | {"window": block[at]["window"]}
        return [*block[:at], {**shared, **data}, *block[at + 1 :]]
    if kind == "short_swa":
        n_heads = block[at]["n_heads"]
        data = {"n_heads": n_heads, "head_dim": block[at]["head_dim"] or base.d_model // n_heads, **data}
    elif kind not in SUBLAYER_PRESETS:
        known = (*(row.kind for row in LOCAL), *SUBLAYER_PRESETS)
        raise ConfigError(f"sequence={kind!r}: must be one that leaves the model as it is; {nearest(kind, known)}")
    return [*block[:at], SEQUENCE.parse(data).to_data(), *block[at:]]


def _with_local(block: list[dict[str, Any]], options: dict[str, Any]) -> list[dict[str, Any]]:
    places, local = _placed(options)
    found = [dict(sublayer) for sublayer in block]
    for letter in places:
        kind, place = LOCAL_PLACES[letter]
        if kind == "decoder":
            continue
        fitting = [sublayer for sublayer in found if sublayer["kind"] == kind]
        if not fitting:
            got = [sublayer["kind"] for sublayer in block]
            raise ConfigError(problem("blocks", got, f"blocks with {kind!r} for place {letter}", "name other places"))
        for sublayer in fitting:
            _check_free(letter, sublayer[f"{place}_local"])
            sublayer[f"{place}_local"] = local
    return found


def _with_embedding(data: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    places, local = _placed(options)
    if "E" not in places:
        return data
    _check_free("E", data["embedding_local"])
    return {**data, "embedding_local": local}


def _check_free(letter: str, holds: Mapping[str, Any] | None) -> None:
    if holds is not None:
        raise ConfigError(f"places: place {letter} holds {holds['kind']!r} already: must be free; name other places")


def _placed(options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The places of a local mixer, and its options."""
    places = options.get("places", USUAL_PLACES.get(options["kind"], "A"))
    if not isinstance(places, str) or not places or not set(places) <= set(LOCAL_PLACES) or len(set(places)) < len(places):
        raise ConfigError(problem("places", places, f"letters of {''.join(LOCAL_PLACES)}, each once", "write for example 'AC'"))
    presets = {row.kind: row.retrofit for row in LOCAL}
    return places, with_preset({name: value for name, value in options.items() if name != "places"}, presets)


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
