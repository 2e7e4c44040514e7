"""Tables that fit a line without breaking a word or a number, and JSON of machine types."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from twoaxis.cli import main
from twoaxis.display import numbers as words
from twoaxis.display.tables import line_width, print_table

from ..scripts import computed_pages

NAMES = ("method", "what it does", "step", "memory", "change")
ROWS = [
    ("plain-residual", "adds 12.5 MB of every update to one stream", "12.34 ms", "1,234.5 MB", "+0.0 %"),
    ("a-method-with-a-long-name", "says_a_very_long_word once", "1.2 s", "8 kB", "\N{MINUS SIGN}1.25 %"),
]

MODEL = """
vocab_size = 512
d_model = 256
n_layers = 2
max_seq_len = 512
blocks = [[{ kind = "attention", n_heads = 4 }, "swiglu"]]
"""


def printed(capsys: pytest.CaptureFixture[str], width: int | None = None) -> list[str]:
    print_table("A title of several words", NAMES, ROWS, NAMES[2:], width, whole=NAMES[:1])
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("width", [40, 50, 60, 79, 80, 160])
def test_no_width_breaks_a_word_a_name_or_a_number(width: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches columns that are squeezed below their contents, and columns that are left out."""
    lines = printed(capsys, width)
    assert max(map(len, lines)) <= max(width, len("a-method-with-a-long-name  says_a_very_long_word"))
    for row in ROWS:
        for cell in (row[0], *row[2:]):
            assert any(re.search(rf"(^|\s){re.escape(cell)}(\s|$)", line) for line in lines), cell
    for part in ("adds", "12.5 MB", "stream", "says_a_very_long_word"):
        assert any(part in line for line in lines), part


def test_what_does_not_fit_follows_behind_the_names(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, 60)
    assert len([line for line in lines if line.startswith("a-method-with-a-long-name")]) == 2
    assert len([line for line in printed(capsys, 100) if line.startswith("a-method-with-a-long-name")]) == 1


def test_a_column_without_a_name_and_cells_of_several_lines_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("", ("name", "", "path"), [("a", "", "one\ntwo")], whole=("path",), width=40)
    assert capsys.readouterr().out.splitlines() == ["name    path", "a       one two"]


@pytest.mark.parametrize(
    ("written", "value", "text"),
    [
        (words.short_count, 999_999, "1 M"),
        (words.short_count, 1e12, "1 T"),
        (words.count_text, 999.6, "1.00 k"),
        (words.count_text, 2, "2"),
        (words.memory, 2**30 - 1, "1.00 GiB"),
        (words.duration, 9.996, "10.0 s"),
        (words.duration, 299.97, "5.0 min"),
        (words.significant, 1234.5, "1,234"),
        (words.significant, 999.6, "1,000"),
        (words.significant, -12.34, "-12.3"),
        (words.plain, True, "yes"),
        (words.percent, 0.9997, "100 %"),
        (words.percent, 0.99, "99.0 %"),
    ],
)
def test_numbers_at_the_edge_of_a_unit_have_no_exponent_and_no_twin(written: Any, value: float, text: str) -> None:
    """Catches `1e+03 k`, `1024 MiB`, and two ways to write one value."""
    assert written(value) == text


def test_a_line_is_as_wide_as_columns_says(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a width of its own for files and pipes."""
    monkeypatch.delenv("COLUMNS", raising=False)
    assert line_width() == 80
    narrow = printed(capsys)
    assert max(map(len, narrow)) <= 80
    monkeypatch.setenv("COLUMNS", "120")
    assert len(printed(capsys)) < len(narrow)


def strange(data: Any, place: str = "") -> list[str]:
    """Keys that are not in snake_case, and numbers that are written as text."""
    if isinstance(data, dict):
        found = [f"{place}: key {key!r}" for key in data if not re.fullmatch(r"[a-z][a-z0-9_]*", key)]
        return found + [each for key, value in data.items() for each in strange(value, f"{place}.{key}")]
    if isinstance(data, list):
        return [each for value in data for each in strange(value, f"{place}[]")]
    number = isinstance(data, str) and re.fullmatch(r"[-+]?[\d,.]+( ?%)?|\d+( x \d+)+", data)
    return [f"{place}: {data!r}"] if number else []


@pytest.mark.parametrize(
    "words",
    [
        ["list"],
        ["show", "deep_delta"],
        ["show", "canon"],
        ["plan", "small.toml", "--gpus", "1", "--goal", "local-mixing"],
    ],
    ids=" ".join,
)
def test_json_has_snake_case_keys_and_numbers_as_numbers(
    words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches JSON that is the table for people in braces."""
    (tmp_path / "small.toml").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    assert main([*words, "--json"]) == 0
    assert strange(json.loads(capsys.readouterr().out)) == []


def test_json_of_all_methods_has_them_too(tmp_path_factory: pytest.TempPathFactory) -> None:
    assert strange(json.loads(computed_pages(tmp_path_factory)["list --design --json"])) == []


def test_the_check_of_json_notices_what_it_is_for() -> None:
    assert len(strange({"at start": 1, "a": "1,234", "b": ["3 x 4"], "c": "12 %", "d": "v1", "e": "1e-3 of it"})) == 4
