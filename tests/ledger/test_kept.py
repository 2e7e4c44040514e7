"""Measurements of deep models are made once, announced once, and read again as long as neither code nor key changes."""

from pathlib import Path
from typing import Any

import pytest

from twoaxis.ledger import kept
from twoaxis.ledger.kept import announcing, read_or_measure


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TWOAXIS_CACHE", str(tmp_path))
    return tmp_path / "measured"


def counting(calls: list[int]) -> Any:
    def measure() -> dict[str, Any]:
        calls.append(len(calls))
        return {"calls": len(calls)}

    return measure


def test_a_key_is_measured_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, said = list[int](), list[str]()
    with announcing(said.append):
        found = [read_or_measure(key, counting(calls)) for key in (("a", 1), ("a", 1), ("a", 2))]
    assert found == [{"calls": 1}, {"calls": 1}, {"calls": 2}] and len(list(folder.iterdir())) == 2
    assert len(said) == 1 and str(folder) in said[0]
    monkeypatch.setattr(kept, "_code", lambda: "newer")
    assert read_or_measure(("a", 1), counting(calls)) == {"calls": 3}


def test_a_damaged_file_and_a_folder_that_cannot_be_written_cost_time_only(folder: Path) -> None:
    calls = list[int]()
    read_or_measure(("a",), counting(calls))
    (path,) = folder.iterdir()
    for damaged in (b'{"calls"', b"null", b'{"key": "another", "found": {}}'):
        path.write_bytes(damaged)
        assert read_or_measure(("a",), counting(calls)) == {"calls": len(calls)}
    path.unlink()
    folder.rmdir()
    folder.write_bytes(b"no folder")
    assert read_or_measure(("a",), counting(calls)) == {"calls": len(calls)} == {"calls": 5}
