"""A file appears whole or not at all."""

import errno
import os
from pathlib import Path

import pytest

from twoaxis.core.atomic import replacing, write_once
from twoaxis.core.errors import DataError

FULL = OSError(errno.ENOSPC, "No space left on device")


def refuse(*_: object) -> None:
    raise FULL


@pytest.mark.parametrize("step", ["replace", "fsync"])
def test_a_full_disk_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")
    monkeypatch.setattr(os, step, refuse)
    with pytest.raises(DataError) as caught, replacing(path, "buy a disk") as file:
        file.write(b"new")
    assert str(caught.value) == f"{path}: cannot be written (No space left on device), nothing was replaced; buy a disk"
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, ValueError])
def test_an_interruption_keeps_the_old_file(tmp_path: Path, interruption: type[BaseException]) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")
    with pytest.raises(interruption), replacing(path) as file:
        file.write(b"new")
        raise interruption
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_nothing_appears_before_the_end(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "a"
    with replacing(path) as file:
        file.write(b"new")
        assert not path.exists()
    assert path.read_bytes() == b"new" and list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("links", ["hard links", "no hard links"])
def test_write_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: str) -> None:
    if links == "no hard links":
        monkeypatch.setattr(os, "link", refuse)
    path = tmp_path / "a"
    write_once(path, b"first")
    assert path.read_bytes() == b"first" and list(tmp_path.iterdir()) == [path]
    write_once(path, b"second")
    assert path.read_bytes() == (b"first" if links == "hard links" else b"second")
    assert list(tmp_path.iterdir()) == [path]
