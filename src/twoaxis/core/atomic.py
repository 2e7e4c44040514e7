"""Files that appear whole or not at all, whatever interrupts the writing; `core.folders` has the same for folders.

A draft beside the target takes its place at the end. What a killed process leaves of one is removed when the same target, or
something else in a folder of ours, is written the next time; as long as any process writes there, nothing is removed.
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
"""How drafts are called: after their target, with a random UUID."""


@contextmanager
def replacing(path: Path, remedy: str = "free space there or choose another folder") -> Iterator[BinaryIO]:
    """Opens a file for writing that takes the place of `path` only when the block ends without an error.

    Raises:
        DataError: the folder cannot be written or the disk is full; the file at `path` is as it was before.
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
    """Writes the file unless another process has written it first: the first complete file stays.

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
                # Some file systems have no hard links; the last complete file stays there.
                os.replace(draft, path)
            sync_folder(path.parent)
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror or error}); {remedy}") from None


def remove_drafts(folder: Path, name: str = "") -> None:
    """Removes the drafts that killed processes have left in a folder, unless a process writes there now.

    Args:
        folder: one of ours, or any when there is a name.
        name: of the target whose drafts go; "" for all.
    """
    with suppress(OSError), _opened(folder) as descriptor:
        if try_lock(descriptor) == "held":
            for entry in os.listdir(folder):
                found = DRAFT.fullmatch(entry)
                if found and name in ("", found["name"]):
                    _remove(folder / entry)


@contextmanager
def draft_of(path: Path) -> Iterator[Path]:
    """A path beside the target to write to; neither the draft nor folders that were made for it stay after an error."""
    made = [folder for folder in path.parents if not folder.exists()]
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_drafts(path.parent, path.name)
        with ExitStack() as stack:
            # Keeps `remove_drafts` of other processes away where the file system has locks, and it removes nothing elsewhere.
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
