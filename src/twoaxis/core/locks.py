"""Locks between processes on an open file or folder, which a killed process lets go by itself."""

import time
from typing import Literal

Lock = Literal["held", "taken", "unknown"]
"""`taken` by another process; `unknown` where the system or the file system has no such locks."""


def try_lock(descriptor: int) -> Lock:
    """Keeps everybody else away until the file is closed, without waiting for who is there."""
    return _flock(descriptor, "exclusive")


def share_lock(descriptor: int) -> Lock:
    """Keeps away who calls `try_lock`, until the file is closed; waits a second for who has it."""
    for _ in range(50):
        if (found := _flock(descriptor, "shared")) != "taken":
            return found
        time.sleep(0.02)
    return "taken"


def _flock(descriptor: int, kind: Literal["exclusive", "shared"]) -> Lock:
    try:
        import fcntl
    except ImportError:
        # Windows has no such lock; there the caution is the user's.
        return "unknown"
    try:
        fcntl.flock(descriptor, fcntl.LOCK_NB | (fcntl.LOCK_SH if kind == "shared" else fcntl.LOCK_EX))
    except OSError as error:
        # File systems without locks refuse with other errors.
        return "taken" if isinstance(error, BlockingIOError) else "unknown"
    return "held"
