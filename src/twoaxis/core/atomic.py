"""Files and folders that appear whole or not at all, whatever interrupts the writing."""

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from twoaxis.core.errors import DataError


@contextmanager
def replacing(path: Path, remedy: str = "free space there or choose another folder") -> Iterator[BinaryIO]:
    """Opens a file for writing that takes the place of `path` only when the block ends without an error.

    Raises:
        DataError: the folder cannot be written or the disk is full; the file at `path` is as it was before.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror or error}), nothing was replaced; {remedy}") from None
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def check_new_folder(path: Path, what: str = "folder") -> Path:
    """The whole path of a folder that is to be made.

    Raises:
        DataError: something is there, other than an empty folder.
    """
    whole = path.resolve()
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
    draft = whole.with_name(f".{whole.name}.{uuid.uuid4().hex}.tmp")
    try:
        draft.mkdir(parents=True)
        yield draft
        # An empty folder gives way.
        draft.replace(whole)
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"{what} {path}: cannot be written ({reason}); free space there or choose another") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def write_once(path: Path, content: bytes, remedy: str = "free space there or choose another folder") -> None:
    """Writes the file unless another process has written it first: the first complete file stays.

    Raises:
        DataError: the folder cannot be written or the disk is full.
    """
    draft = path.with_name(f"{path.name}.{uuid.uuid4().hex}.draft")
    with replacing(draft, remedy) as file:
        file.write(content)
    try:
        os.link(draft, path)
    except FileExistsError:
        pass
    except OSError:
        # Some file systems have no hard links; the last complete file stays there.
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    # A rename is durable only once its folder is; systems that cannot open a folder need no sync.
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
