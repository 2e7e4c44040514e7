"""Every mixer says the same things about itself, and chooses by name rather than by a switch."""

import typing
from collections.abc import Iterator

import pytest

import twoaxis.depth
import twoaxis.feed_forward
import twoaxis.local
import twoaxis.sequence
from twoaxis.core.registry import Row

FIELDS = ["Equation:", "Source:", "Deviates:", "Shapes:", "Init:", "Cost:"]
ROWS = [*twoaxis.depth.DEPTH, *twoaxis.sequence.SEQUENCE, *twoaxis.feed_forward.FEED_FORWARD, *twoaxis.local.LOCAL]


def _types(annotation: object) -> Iterator[object]:
    yield annotation
    for part in typing.get_args(annotation):
        yield from _types(part)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.kind)
def test_config_docstring_has_every_field(row: Row) -> None:
    text = row.config.__doc__ or ""
    assert not [field for field in FIELDS if field not in text], f"{row.config.__name__} lacks docstring fields"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.kind)
def test_config_has_no_boolean_mode(row: Row) -> None:
    booleans = [name for name, field in row.config.model_fields.items() if bool in _types(field.annotation)]
    assert not booleans, f"{row.config.__name__}: name the alternatives of {booleans} instead of switching"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.kind)
def test_row_has_a_summary_and_examples_that_build(row: Row) -> None:
    assert row.summary.strip() and "\n" not in row.summary
    assert row.examples
    assert all(row.example(name).to_data()["kind"] == row.kind for name in row.examples)
