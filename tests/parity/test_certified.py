"""Every form in the tables says whether it is certified or reconstructed; `test_parity` sees that the golden tensors agree.

A form is certified when the adapter of a fixture of public code builds it: the same operator, whatever its sizes and start.
"""

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest

from twoaxis import DEPTH, FEED_FORWARD, LOCAL, SEQUENCE
from twoaxis.core.registry import choices

from .adapters import claimed_by
from .conftest import KEPT
from .golden import Golden, fixture_paths

ROWS: tuple[Any, ...] = (*DEPTH, *SEQUENCE, *FEED_FORWARD, *LOCAL)

NOT_PUBLIC = ("TRANSCRIBED by hand", "DERIVED, no public code", "made from the published equations", "REPLACED by nn.Identity")
"""How fixtures say that they are not what a public program computes as it is; one with a `patch` says so too."""


def is_public_code(about: Mapping[str, Any]) -> bool:
    words = json.dumps({name: text for name, text in about.items() if name != "tensors"})
    return not about.get("patch") and not any(each in words for each in NOT_PUBLIC)


@cache
def operators() -> list[tuple[Any, str, Any]]:
    """Every form: its row, its name, and the operator that it is."""
    return [(row, name, choices(row.example(name))) for row in ROWS for name in row.examples]


def assert_tables_agree(golden: Golden, built: list[Any]) -> None:
    """A fixture shows the forms that it certifies, and none that is declared as reconstructed."""
    found = [choices(config) for config in built] if is_public_code(golden.about) else []
    for row, name, operator in operators():
        form = f"{row.kind}: {name}"
        if row.certified.get(name) == golden.name:
            assert operator in found, f"{form} is declared as certified by {golden.name}, which does not build it"
        elif operator in found:
            assert name in row.certified, f"{form} is reconstructed as declared, but {golden.name} certifies it"


@pytest.fixture(scope="module")
def public() -> set[str]:
    """The fixtures of public code."""
    found = [json.loads(path.read_text()) for path in fixture_paths(KEPT)]
    return {about["name"] for about in found if claimed_by(about["name"]) is not None and is_public_code(about)}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.kind)
def test_only_examples_are_certified_and_by_public_code_alone(row: Any, public: set[str]) -> None:
    assert row.certified.keys() <= row.examples.keys()
    assert set(row.certified.values()) <= public


def test_what_is_not_public_code_certifies_nothing(public: set[str]) -> None:
    assert not {"mhar-op", "kvshift-paper-op", "ddl-vdim1-writeonly", "dca-grn-v3-paper"} & public
    assert {"attnres-full", "kvshift-op", "ddl-vdim1", "dca-grn-v1"} <= public


def notes(patch: pytest.MonkeyPatch) -> list[Any]:
    """What is built from now on, as long as the patch lasts."""
    built: list[Any] = []
    for row in ROWS:
        patch.setattr(row.config, "build", _noting(row.config.build, built))
    return built


def _noting(build: Any, built: list[Any]) -> Any:
    def noted(config: Any, *given: Any, **named: Any) -> Any:
        built.append(config)
        return build(config, *given, **named)

    return noted
