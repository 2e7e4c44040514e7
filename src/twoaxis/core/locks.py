"""Locks between processes on an open file or folder; the system releases those of a killed process."""

import time
from typing import Literal

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
