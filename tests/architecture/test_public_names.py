"""The public names are a promise: adding or removing one is a decision that a diff shows."""

from pathlib import Path

import twoaxis

SNAPSHOT = Path(__file__).with_name("public_names.txt")


def test_public_names_equal_the_snapshot() -> None:
    expected = SNAPSHOT.read_text().split()
    message = f"public names changed; if that is meant, note it in CHANGELOG.md and write the new list to {SNAPSHOT.name}"
    assert sorted(twoaxis.__all__) == sorted(expected), message


def test_public_names_exist_and_are_sorted() -> None:
    assert all(hasattr(twoaxis, name) for name in twoaxis.__all__)
    assert len(set(twoaxis.__all__)) == len(twoaxis.__all__)
