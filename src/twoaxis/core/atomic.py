"""Atomic writing of files; for folders see `core.folders`.

A draft in the same folder replaces the target at the end. The drafts of killed processes are removed the next time that the
same target, or anything in a folder of ours, is written, unless another process is writing there.
"""

import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from twoaxis.core.errors import DataError
from twoaxis.core.locks import share_lock, try_lock

DRAFT = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{12}4[0-9a-f]{3}[89ab][0-9a-f]{15}\.tmp", re.DOTALL)
"""The names of drafts: their target and a random UUID."""


@contextmanager
def replacing(path: Path, remedy: str = "free space there or choose another folder") -> Iterator[BinaryIO]:
    """Opens a file for writing that replaces `path` when the block ends without an error.

    Raises:
        DataError: the folder cannot be written or the disk is full; the file at `path` is unchanged.
    """
    try:
        with draft_of(path) as draft:
            with _durable(draft) as file:
                yield file
            os.replace(draft, path)
            sync_folder(path.parent)
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror or error}), nothing was replaced; {remedy}") from None


def write_once(path: Path, content: bytes, remedy: str = "free space there or choose another folder") -> None:
    """Writes the file unless it exists: the first complete file stays.

    Raises:
        DataError: the folder cannot be written or the disk is full.
    """
    try:
        with draft_of(path) as draft:
            with _durable(draft) as file:
                file.write(content)
            try:
                os.link(draft, path)
            except FileExistsError:
                pass
            except OSError:
                # Without hard links in the file system, the last complete file stays.
                os.replace(draft, path)
            sync_folder(path.parent)
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror or error}); {remedy}") from None


def remove_drafts(folder: Path, name: str = "") -> None:
    """Removes the drafts of killed processes in a folder of ours, or of one target, unless a process is writing there."""
    with suppress(OSError), _opened(folder) as descriptor:
        if try_lock(descriptor) == "held":
            for entry in os.listdir(folder):
                found = DRAFT.fullmatch(entry)
                if found and name in ("", found["name"]):
                    _remove(folder / entry)


@contextmanager
def draft_of(path: Path) -> Iterator[Path]:
    """A path to write to, in the folder of the target; after an error, the draft and new folders are removed."""
    made = [folder for folder in path.parents if not folder.exists()]
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_drafts(path.parent, path.name)
        with ExitStack() as stack:
            # Against `remove_drafts` of other processes, which removes nothing on a file system without locks.
            with suppress(OSError):
                share_lock(stack.enter_context(_opened(path.parent)))
            yield draft
    except BaseException:
        _remove(draft)
        for folder in made:
            with suppress(OSError):
                folder.rmdir()
        raise
    _remove(draft)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Flushes a file or a folder to disk; systems that cannot open a folder need no flush."""
    with suppress(PermissionError), _opened(path) as descriptor:
        os.fsync(descriptor)


def sync_folder(folder: Path) -> None:
    """Makes a rename in the folder durable, if the file system can."""
    with suppress(OSError):
        sync(folder)


@contextmanager
def _durable(path: Path) -> Iterator[BinaryIO]:
    with open(path, "xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
