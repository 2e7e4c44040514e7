"""A file appears whole or not at all."""

import errno
import os
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from twoaxis.core.errors import DataError
from twoaxis.core.files import remove_drafts, replacing, write_once

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


@pytest.mark.parametrize("write", [lambda path: write_once(path, b"new"), lambda path: replace(path, b"new")])
def test_the_next_writing_removes_what_a_killed_process_has_left(tmp_path: Path, write: Callable[[Path], None]) -> None:
    """Catches drafts that nobody ever removes, and drafts of others that are taken for ours."""
    path, other = tmp_path / "a", tmp_path / "other"
    left, foreign = killed(path), [killed(other), tmp_path / ".a.tmp", tmp_path / f".a.{'0' * 32}.tmp"]
    for one in foreign[1:]:
        one.write_bytes(b"not ours")
    write(path)
    assert path.read_bytes() == b"new" and not left.exists() and all(one.exists() for one in foreign)
    remove_drafts(tmp_path)
    assert not foreign[0].exists() and all(one.exists() for one in foreign[1:])


def test_a_draft_stays_while_any_process_writes_there(tmp_path: Path) -> None:
    """Catches a start that takes another's draft away from under it."""
    path = tmp_path / "a"
    with replacing(path) as file:
        [draft] = tmp_path.iterdir()
        remove_drafts(tmp_path)
        write_once(path, b"another process")
        assert draft.exists()
        file.write(b"new")
    assert path.read_bytes() == b"new" and list(tmp_path.iterdir()) == [path]


def test_folders_made_for_nothing_are_removed(tmp_path: Path) -> None:
    with pytest.raises(ValueError), replacing(tmp_path / "deep" / "er" / "a"):
        raise ValueError
    assert not list(tmp_path.iterdir())


def replace(path: Path, content: bytes) -> None:
    with replacing(path) as file:
        file.write(content)


def killed(path: Path) -> Path:
    """The draft of a process that was killed while it wrote."""
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    draft.write_bytes(b"half")
    return draft
