"""No option is without a value: every choice of every field stands in a case, and changes what is computed there.

A case is compared with its equation and its initial values are kept, so that a new option has to enter both.
"""

import functools
import json
import types
import typing
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import pytest
import torch

from twoaxis.core.config import Config
from twoaxis.core.errors import ConfigError
from twoaxis.core.measure import noise
from twoaxis.core.registry import ENGINES
from twoaxis.depth import DEPTH
from twoaxis.ops.rope import ROPE_SCALING

from . import test_sequence
from .cases import TABLES, Case, every_case, nested, rows_of
from .initial_values import starts
from .setting import LENGTHS, B, D, Ours, T, embeddings, stack_of

OTHER = "another than by default"
"""Stands for any number, length or part."""


class Option(NamedTuple):
    """One choice of one field, under the class that declares it."""

    owner: str
    field: str
    choice: Any


def owner_of(config: type[Config], name: str) -> str:
    """The class that declares a field as it is here: forms of one mixer share options."""
    return next(c.__name__ for c in config.__mro__ if name in vars(c).get("__annotations__", {}))


def literals(annotation: Any) -> Iterator[Any]:
    """The names that a field can have."""
    if typing.get_origin(annotation) is Literal:
        yield from typing.get_args(annotation)
    elif typing.get_origin(annotation) in (typing.Union, types.UnionType, typing.Annotated):
        for part in typing.get_args(annotation):
            yield from literals(part)


def options_of(config: type[Config]) -> Iterator[Option]:
    """Every choice that has to stand in a case: each name, and for a field without names one more than its default."""
    for name, info in config.model_fields.items():
        names = [choice for choice in literals(info.annotation) if choice != info.default]
        if name not in ENGINES | {"kind"}:
            yield from (Option(owner_of(config, name), name, choice) for choice in names or [OTHER])


CONFIGS: list[type[Config]] = [row.config for table in (*TABLES, ROPE_SCALING) for row in rows_of(table)]
OPTIONS = sorted({option for config in CONFIGS for option in options_of(config)})

SAME = {
    Option("DepthAttentionConfig", "output_init", "zero"): "names what is meant where nothing is said",
    Option("MHCConfig", "start", "log"): "computes the same on logarithms, which cannot overflow",
    Option("NgramEmbeddingConfig", "gate", "copysign"): "differs at a score of 0, which parity tests have",
    Option("TableOptions", "document_reset", "hash_only"): "differs where a document begins behind another",
    Option("TableOptions", "document_reset", "none"): "differs where a document begins behind another",
    Option("TableOptions", "untrained_row", OTHER): "changes a gradient alone",
}
"""Choices that compute what the default does, and why they exist."""


@functools.cache
def held() -> dict[Option, list[tuple[Case, Config]]]:
    """The cases that hold each option, with the part of them that does."""
    found: dict[Option, list[tuple[Case, Config]]] = {}
    for case in every_case():
        for part in nested(case.config):
            for name, info in type(part).model_fields.items():
                value = getattr(part, name)
                if value != info.default:
                    choice = value if value in list(literals(info.annotation)) else OTHER
                    found.setdefault(Option(owner_of(type(part), name), name, choice), []).append((case, part))
    return found


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: "-".join(map(str, option)))
def test_an_option_stands_in_a_case_and_changes_something(option: Option) -> None:
    cases = held().get(option, [])
    name, choice = f"{option.owner}.{option.field}", option.choice
    assert cases, f"{name}={choice!r} stands in no example and not in values/cases.py; add a case, and it to its equation"
    if type(cases[0][1]).model_fields[option.field].is_required():
        return
    changes = any(computed(case.config) != computed(without(case, part, option.field)) for case, part in cases)
    what = f"{name}={choice!r} computes and starts as its default does; drop the option, mend it, or say why it is there"
    assert changes == (option not in SAME), what


def without(case: Case, part: Config, field: str) -> Any:
    """The configuration of a case with one field of one part left out; None when the others then do not fit."""
    try:
        if case.config is part:
            return type(part).from_data({name: value for name, value in case.options.items() if name != field})
        return replaced(case.config, part, part.replace(**{field: type(part).model_fields[field].default}))
    except ConfigError:
        return None


def replaced(config: Any, part: Config, other: Config) -> Any:
    """The configuration with another part."""
    if config is part:
        return other
    for name in type(config).model_fields:
        value = getattr(config, name)
        if isinstance(value, Config) and part in list(nested(value)):
            return config.replace(**{name: replaced(value, part, other)})
    raise AssertionError("the part is not in the configuration")


@torch.no_grad()
def computed(config: Any) -> str:
    """What a configuration starts at, and what it computes away from there."""
    try:
        return "refused" if config is None else _computed(json.dumps(config.to_data()))
    except ConfigError:
        return "refused"


@functools.cache
def _computed(data: str) -> str:
    parsed = json.loads(data)
    config = next(table for table in TABLES if parsed["kind"] in table).parse(parsed)
    if parsed["kind"] in DEPTH:
        ours = Ours(config, stack_of(config, LENGTHS[0]))
        views, left = ours.run(embeddings())
        output = [*(view for read in views for view in read), left]
    else:
        output = [test_sequence.built(config)(noise((B, T, D), "context"), test_sequence.LAYOUT)[0]]
    return f"{starts(config)} {[x.mul(1e9).round().sum().item() for x in output]}"
