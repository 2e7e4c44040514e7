"""Files and folders that appear whole or not at all, and locks between processes.

A draft in the same folder replaces the target at the end. The drafts of killed processes are removed the next time that the
same target, or anything in a folder of ours, is written, unless another process is writing there.
"""

import hashlib
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Literal

from twoaxis.core.config import Config
from twoaxis.core.errors import CheckpointError, DataError, system_reason

Lock = Literal["held", "taken", "unknown"]
"""`taken` by another process; `unknown` if the system or the file system has no locks."""


def try_lock(descriptor: int) -> Lock:
    """Takes the exclusive lock until the file is closed, without waiting."""
    return _flock(descriptor, "exclusive")


def share_lock(descriptor: int) -> Lock:
    """Takes a shared lock until the file is closed; waits at most a second for an exclusive one."""
    for _ in range(50):
        if (found := _flock(descriptor, "shared")) != "taken":
            return found
        time.sleep(0.02)
    return "taken"


def _flock(descriptor: int, kind: Literal["exclusive", "shared"]) -> Lock:
    try:
        import fcntl
    except ImportError:
        # Windows has no such lock.
        return "unknown"
    try:
        fcntl.flock(descriptor, fcntl.LOCK_NB | (fcntl.LOCK_SH if kind == "shared" else fcntl.LOCK_EX))
    except OSError as error:
        # File systems without locks raise other errors.
        return "taken" if isinstance(error, BlockingIOError) else "unknown"
    return "held"


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


CACHE_VARIABLE = "TWOAXIS_CACHE"
"""The environment variable that names the cache folder."""

CACHE_REMEDY = f"free space there or set {CACHE_VARIABLE} to another folder"
"""The remedy when the cache cannot be written."""

LOCKED = {"run": "trains in it", "study": "runs it"}
"""What another process does in a folder that it has locked."""


CachePath = str | os.PathLike[str] | None
"""A cache folder; None is the default one."""


def cache_folder(path: CachePath = None) -> Path:
    """Returns the given folder, else the one in `TWOAXIS_CACHE`, else `~/.cache/twoaxis`.

    Raises:
        DataError: the home folder that it names is unknown.
    """
    named = Path(path or os.environ.get(CACHE_VARIABLE) or "~/.cache/twoaxis")
    try:
        return named.expanduser()
    except RuntimeError:
        raise DataError(f"cache folder {named}: its home folder is unknown; set {CACHE_VARIABLE} to another folder") from None


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
        DataError: something is there, other than an empty folder, or the path is invalid or no UTF-8.
    """
    whole = check_utf8(path, what)
    try:
        whole = whole.resolve()
        taken = whole.exists() and (not whole.is_dir() or any(whole.iterdir()))
    # RuntimeError: a loop of links; ValueError: an invalid character.
    except (OSError, RuntimeError, ValueError) as error:
        raise DataError(f"{what} {path}: cannot be written ({system_reason(error) or error}); choose another") from None
    if taken:
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
