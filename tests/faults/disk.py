"""A disk that fails, or a process that dies, at the n-th thing that is written; only the standard library, to load first."""

import builtins
import errno
import io
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

Fault = Literal["none", "full", "read-only", "SIGTERM", "SIGKILL"]


class Disk:
    """Stands between Python and the files below a folder, and counts what is written: files, parts of them, folders, names.

    `full` refuses everything from the n-th time on, as a full disk does; `read-only` refuses everything, removals too; a signal
    reaches the process at the n-th time, SIGKILL when half of it is written.

    Args:
        within: the folder.
        fault: what happens.
        at: how many times nothing happens before.
    """

    def __init__(self, within: Path, fault: Fault = "none", at: int = 0) -> None:
        self.within, self.fault, self.at, self.count = os.fspath(within), fault, at, 0

    def attach(self) -> None:
        """Takes effect for the rest of the process."""
        self._open = io.open
        io.open = builtins.open = self.open  # type: ignore[assignment]
        for name in ("mkdir", "rename", "replace", "link"):
            setattr(os, name, self._counted(getattr(os, name)))
        for name in ("unlink", "remove", "rmdir"):
            setattr(os, name, self._kept(getattr(os, name)))
        sync = os.fsync
        os.fsync = lambda descriptor: self._sync(sync, descriptor)  # type: ignore[assignment]

    def attach_to_safetensors(self) -> None:
        """The same for what is written in Rust."""
        import safetensors.torch as library

        real: Callable[..., None] = library.serialize_file  # type: ignore[attr-defined]

        def serialize_file(tensors: Any, filename: Any, *rest: Any, **options: Any) -> None:
            def write_half() -> None:
                real(tensors, filename, *rest, **options)
                os.truncate(filename, os.path.getsize(filename) // 2)

            try:
                self.touch(filename, write_half)
            except OSError as error:
                raise library.SafetensorError(f"I/O error: {error.strerror} (os error {error.errno})") from None  # type: ignore[attr-defined]
            real(tensors, filename, *rest, **options)

        library.serialize_file = serialize_file  # type: ignore[attr-defined]

    def touch(self, path: Any, write_half: Callable[[], object] = lambda: None) -> None:
        """Counts one change of what is below the folder."""
        if not self.holds(path):
            return
        number, self.count = self.count, self.count + 1
        if self.fault == "read-only":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), os.fspath(path))
        if self.fault == "full" and number >= self.at:
            if number == self.at:
                write_half()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(path))
        if self.fault.startswith("SIG") and number == self.at:
            if self.fault == "SIGKILL":
                write_half()
            os.kill(os.getpid(), getattr(signal, self.fault))

    def holds(self, path: Any) -> bool:
        """Whether something is below the folder."""
        return not isinstance(path, int) and os.path.abspath(os.fsdecode(path)).startswith(self.within + os.sep)

    def open(
        self,
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        *rest: Any,
        **options: Any,
    ) -> Any:
        """What `open` does, with counted writes."""
        if not self.holds(file) or not set(mode) & set("wxa+"):
            return self._open(file, mode, buffering, encoding, errors, newline, *rest, **options)
        self.touch(file)
        raw = _File(self, os.fsdecode(file), mode.replace("b", "").replace("t", ""))
        if buffering == 0:
            return raw
        buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding or "utf-8", errors, newline)

    def _counted(self, real: Callable[..., None]) -> Callable[..., None]:
        def change(*paths: Any, **options: Any) -> None:
            # The last name that is given; after that of a new folder may come its mode.
            self.touch([path for path in paths if not isinstance(path, int)][-1])
            real(*paths, **options)

        return change

    def _kept(self, real: Callable[..., None]) -> Callable[..., None]:
        def remove(path: Any, **options: Any) -> None:
            if self.fault == "read-only" and self.holds(path):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), os.fspath(path))
            real(path, **options)

        return remove

    def _sync(self, real: Callable[[int], None], descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        # Names are on the disk by then, so that syncing a folder is not refused.
        if os.path.isfile(path):
            self.touch(path)
        real(descriptor)


class _File(io.FileIO):
    def __init__(self, disk: Disk, path: str, mode: str) -> None:
        super().__init__(path, mode)
        self._disk = disk

    def write(self, data: Any) -> int:
        half = bytes(data)[: len(data) // 2]
        self._disk.touch(self.name, lambda: super(_File, self).write(half))
        return super().write(data)
