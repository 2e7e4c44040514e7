"""Folders that appear whole or not at all, and folders that are ours or nobody's."""

import errno
import os
import uuid
from pathlib import Path
from typing import Literal

import pytest

from twoaxis.core.errors import CheckpointError, DataError
from twoaxis.core.files import check_utf8, locked_folder, new_folder

NOT_UTF8 = os.fsdecode(b"caf\xe9")


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        # As tokenizers and safetensors put it.
        Exception("No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_leaves_nothing_whoever_words_it(tmp_path: Path, error: Exception) -> None:
    path = tmp_path / "new" / "a"
    message = r"run folder .*a: cannot be written \(No space left on device\); free space"
    with pytest.raises(DataError, match=message), new_folder(path, "run folder") as draft:
        (draft / "half").write_bytes(b"half")
        raise error
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "reason"), [("a" * 300, "File name too long"), ("loop/a", "Symlink loop"), ("a\0b", "embedded null")]
)
def test_a_path_that_cannot_be_is_refused(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    message = rf"folder .*: cannot be written \(.*{reason}.*\); choose another"
    with pytest.raises(DataError, match=message), new_folder(tmp_path / name):
        pass


@pytest.mark.parametrize(
    "error", [ValueError("seven"), CheckpointError("a.bin: no such file (os error 2)"), KeyboardInterrupt()]
)
def test_other_errors_keep_their_words(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, new_folder(tmp_path / "a"):
        raise error
    assert caught.value is error and not list(tmp_path.iterdir())


def test_the_next_start_removes_what_a_killed_one_has_left(tmp_path: Path) -> None:
    left = [tmp_path / f".{name}.{uuid.uuid4().hex}.tmp" for name in ("a", "b")]
    for one in left:
        (one / "deep").mkdir(parents=True)
        (one / "deep" / "half").write_bytes(b"half")
    with new_folder(tmp_path / "a") as draft:
        (draft / "file").write_bytes(b"whole")
    assert sorted(tmp_path.iterdir()) == [left[1], tmp_path / "a"]


@pytest.mark.parametrize("what", ["run", "study"])
def test_a_folder_of_something_else_is_refused(tmp_path: Path, what: Literal["run", "study"]) -> None:
    """Catches a run or a study that is written between files of others."""
    (tmp_path / "notes.txt").write_text("mine")
    message = rf"{what} folder .*: holds 'notes.txt' and no {what}: must be new, empty or that of an earlier {what}; choose"
    with pytest.raises(DataError, match=message), locked_folder(tmp_path, what, "sign.json"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    (tmp_path / "sign.json").write_text("{}")
    with locked_folder(tmp_path, what, "sign.json"):
        pass


def test_what_a_killed_start_has_left_is_no_other_content(tmp_path: Path) -> None:
    (tmp_path / ".lock").touch()
    draft = tmp_path / f".config.json.{uuid.uuid4().hex}.tmp"
    draft.write_bytes(b"half")
    with locked_folder(tmp_path, "run", "config.json"):
        assert not draft.exists()


def test_a_path_that_is_not_utf8_is_refused_with_its_bytes(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"folder .*caf\\xe9/a: the path must be UTF-8; rename the folder, or choose another"):
        check_utf8(tmp_path / NOT_UTF8 / "a", "folder")
    assert check_utf8(tmp_path / "café", "folder") == tmp_path / "café"
