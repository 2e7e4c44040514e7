"""Folders that a verb makes: new ones, which appear whole or not at all, and those that it works in and comes back to."""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from twoaxis.core.atomic import DRAFT, draft_of, remove_drafts, sync_folder
from twoaxis.core.config import Config
from twoaxis.core.errors import CheckpointError, DataError, system_reason
from twoaxis.core.locks import try_lock

CACHE_VARIABLE = "TWOAXIS_CACHE"
"""The environment variable that names the cache folder."""

CACHE_REMEDY = f"free space there or set {CACHE_VARIABLE} to another folder"
"""What to do when the cache cannot be written."""

LOCKED = {"run": "trains in it", "study": "runs it"}
"""What another process does in a folder that it has locked."""


def cache_folder(path: str | os.PathLike[str] | None = None) -> Path:
    """Returns the given folder, else the one in `TWOAXIS_CACHE`, else `~/.cache/twoaxis`."""
    return Path(path or os.environ.get(CACHE_VARIABLE) or "~/.cache/twoaxis").expanduser()


def check_utf8(path: Path, what: str) -> Path:
    """The path, if libraries that read and write checkpoints can be given it.

    Raises:
        DataError: bytes of the whole path are no UTF-8.
    """
    whole = os.fsencode(path.absolute())
    try:
        whole.decode()
    except UnicodeDecodeError:
        shown = whole.decode(errors="backslashreplace")
        raise DataError(f"{what} {shown}: the path must be UTF-8; rename the folder, or choose another") from None
    return path


def check_new_folder(path: Path, what: str = "folder") -> Path:
    """The whole path of a folder that is to be made.

    Raises:
        DataError: something is there, other than an empty folder, or the path is no UTF-8.
    """
    whole = check_utf8(path, what).resolve()
    if whole.exists() and (not whole.is_dir() or any(whole.iterdir())):
        raise DataError(f"{what} {path}: is not empty; must be new or empty; choose another, or empty it")
    return whole


@contextmanager
def new_folder(path: Path, what: str = "folder") -> Iterator[Path]:
    """Makes a folder to write into that takes its place only when the block ends without an error.

    Raises:
        DataError: something is there, or nothing can be written; nothing is left then.
    """
    whole = check_new_folder(path, what)
    try:
        with draft_of(whole) as draft:
            draft.mkdir()
            yield draft
            # An empty folder gives way.
            draft.replace(whole)
            sync_folder(whole.parent)
    except Exception as error:
        reason = system_reason(error)
        if reason is None:
            raise
        raise DataError(f"{what} {path}: cannot be written ({reason}); free space there or choose another") from None


@contextmanager
def locked_folder(path: Path, what: Literal["run", "study"], sign: str) -> Iterator[None]:
    """Makes a folder unless it is there, keeps other processes out of it, and removes what killed ones had begun to write.

    Args:
        path: of the folder.
        what: belongs there.
        sign: the file by which a folder of this kind is known.

    Raises:
        CheckpointError: another process works in it.
        DataError: it cannot be made, or holds something else.
    """
    try:
        _check_own(check_utf8(path, f"{what} folder"), what, sign)
        path.mkdir(parents=True, exist_ok=True)
        file = open(path / ".lock", "ab")  # noqa: SIM115, closed below
    except OSError as error:
        raise DataError(f"{what} folder {path}: cannot be written ({error.strerror}); choose another folder") from None
    with file:
        if try_lock(file.fileno()) == "taken":
            raise CheckpointError(f"{what} folder {path}: another process {LOCKED[what]}; wait for it or stop it")
        remove_drafts(path)
        yield


def _check_own(path: Path, what: str, sign: str) -> None:
    if not path.is_dir() or (path / sign).exists():
        return
    # Left by a process that was killed at its start.
    foreign = sorted(name for name in os.listdir(path) if name != ".lock" and not DRAFT.fullmatch(name))
    if foreign:
        raise DataError(
            f"{what} folder {path}: holds {foreign[0]!r} and no {what}: must be new, empty or that of an earlier {what}; "
            "choose another folder"
        )


def default_name(what: str, source: object, config: Config) -> str:
    """The default name of a folder: that of the file, else one that equal configurations share.

    Example:
        >>> default_name("train", "recipes/tiny.toml", Config())
        'tiny'
    """
    if isinstance(source, Path | str):
        return Path(source).stem
    return f"{what}-{hashlib.sha256(json.dumps(config.to_data(), sort_keys=True).encode()).hexdigest()[:8]}"
