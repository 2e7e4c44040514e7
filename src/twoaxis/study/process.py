"""One run as a process of its own: watched, stopped gently, and its last words kept."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

POLL_SECONDS = 0.2
"""Seconds between looks at a running process."""

PATIENCE_SECONDS = 60.0
"""How long a process that was asked to stop may take to save its checkpoint."""


def run_process(
    command: Sequence[str], log: Path, watch: Callable[[], None], environment: Mapping[str, str] | None = None
) -> int:
    """Runs a command until it ends, with its standard error in `log` and some variables beside those of this process.

    An interrupt of this process is passed on: the command is asked to stop, may save what it has, and the interrupt is
    raised again after its end.

    Returns:
        The exit code, negative for a signal.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as file:
        # In a session of its own, so that Ctrl-C reaches it once, from here, and not also from the terminal.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=file,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )
        try:
            while process.poll() is None:
                watch()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(POLL_SECONDS)
        except BaseException:
            _stop(process)
            raise
    return process.returncode


def last_words(log: Path, code: int, begin: int = 0) -> str:
    """How a command ended, with the last line it wrote after the first `begin` bytes of the log.

    Example:
        >>> last_words(Path("/nowhere"), -9)
        'killed by SIGKILL without a word'
    """
    how = f"ended with exit code {code}" if code >= 0 else f"killed by {_signal_name(-code)}"
    text = log.read_bytes()[begin:].decode("utf-8", "replace") if log.exists() else ""
    lines = [line.strip() for line in text.splitlines()]
    said = next((line for line in reversed(lines) if line), None)
    return f"{how}: {said[:500]}" if said else f"{how} without a word"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    # Not SIGINT, which everything that a shell starts in the background ignores.
    process.terminate()
    try:
        process.wait(PATIENCE_SECONDS)
    except BaseException:
        # Too slow, or interrupted a second time: its last checkpoint is safe whatever happens now.
        process.kill()
        process.wait()
