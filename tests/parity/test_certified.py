"""Every form in the tables says whether it is certified or reconstructed, and the golden tensors agree.

A form is certified when the adapter of a fixture of public code builds it: the same operator, whatever its sizes and start.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from twoaxis import DEPTH, FEED_FORWARD, LOCAL, SEQUENCE
from twoaxis.core.registry import choices

from .adapters import claimed_by
from .conftest import KEPT
from .golden import Golden, fixture_paths

TABLES: tuple[Any, ...] = (DEPTH, SEQUENCE, FEED_FORWARD, LOCAL)
FORMS = [pytest.param(row, name, id=f"{row.kind}-{name}") for table in TABLES for row in table for name in row.examples]

NOT_PUBLIC = ("TRANSCRIBED by hand", "DERIVED, no public code", "made from the published equations", "REPLACED by nn.Identity")
"""How fixtures say that they are not what a public program computes as it is; one with a `patch` says so too."""


def is_public_code(golden: Golden) -> bool:
    about = json.dumps({name: text for name, text in golden.about.items() if name != "tensors"})
    return not golden.about.get("patch") and not any(words in about for words in NOT_PUBLIC)


@pytest.fixture(scope="module")
def built() -> Iterator[dict[str, list[dict[str, Any]]]]:
    """The operators that the adapter of each fixture of public code builds."""
    configs: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        for row in (row for table in TABLES for row in table):
            patch.setattr(row.config, "build", noting(row.config.build, configs))
        found = {}
        for path in fixture_paths(KEPT):
            golden = Golden.read(path)
            run = claimed_by(golden.name)
            if run is not None and is_public_code(golden):
                configs.clear()
                run(golden)
                found[golden.name] = [choices(config) for config in configs]
        yield found


def noting(build: Any, configs: list[Any]) -> Any:
    def noted(config: Any, *given: Any, **named: Any) -> Any:
        configs.append(config)
        return build(config, *given, **named)

    return noted


@pytest.mark.parametrize(("row", "name"), FORMS)
def test_a_form_is_certified_by_a_fixture_that_builds_it_or_reconstructed(
    row: Any, name: str, built: dict[str, list[dict[str, Any]]]
) -> None:
    operator = choices(row.example(name))
    showing = {fixture for fixture, operators in built.items() if operator in operators}
    if name in row.certified:
        assert row.certified[name] in showing, f"declared by {row.certified[name]}, built by {sorted(showing)}"
    else:
        assert not showing, "reconstructed as declared, but these fixtures certify it"


@pytest.mark.parametrize("row", [row for table in TABLES for row in table], ids=lambda row: row.kind)
def test_only_examples_are_certified(row: Any) -> None:
    assert row.certified.keys() <= row.examples.keys()


def test_what_is_not_public_code_certifies_nothing(built: dict[str, list[dict[str, Any]]]) -> None:
    assert not {"mhar-op", "kvshift-paper-op", "ddl-vdim1-writeonly", "dca-grn-v3-paper"} & built.keys()
    assert {"attnres-full", "kvshift-op", "ddl-vdim1", "dca-grn-v1"} <= built.keys()
