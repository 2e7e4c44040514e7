"""Where the runs of a study are made: processes on this machine, or on whatever an engine reaches."""

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import torch

POLL_SECONDS = 0.2
"""Seconds between looks at what runs."""

F = TypeVar("F")


class Task(NamedTuple):
    """One process to run.

    Attributes:
        name: of the run, for messages.
        command: what to run.
        run: the folder that it works in.
        log: where its standard error goes.
        environment: variables that it gets beside those of this process.
    """

    name: str
    command: tuple[str, ...]
    run: Path
    log: Path
    environment: Mapping[str, str]


class Listener(Protocol):
    """Callbacks about tasks, always from the thread that runs the engine.

    An exception in it, an interrupt among them, stops what runs gently (each run saves a checkpoint) and is raised again.
    """

    def began(self, task: Task) -> None:
        """A task begins."""

    def watch(self) -> None:
        """Some time has passed."""

    def note(self, text: str) -> None:
        """A line for the user."""

    def ended(self, task: Task, code: int) -> None:
        """A task has ended with this exit code, negative for a signal."""


class Engine(Protocol):
    """Runs tasks until all have ended, whatever they end with.

    Attributes:
        threads: that a run computes with, since they may change its last digits; None when only a run itself will know.
    """

    threads: int | None

    def run(self, tasks: Sequence[Task], listener: Listener) -> None:
        """Runs the tasks in this order, as many at once as the engine has room for."""


class LocalEngine:
    """Runs processes on this machine.

    Args:
        jobs: how many at once; the processor's cores are shared out between them.
    """

    def __init__(self, jobs: int = 1) -> None:
        self.jobs = jobs
        self.threads: int | None = torch.get_num_threads() if jobs == 1 else max(1, (os.cpu_count() or 1) // jobs)

    def run(self, tasks: Sequence[Task], listener: Listener) -> None:
        """Runs the tasks in threads that each wait for one process."""
        stop = threading.Event()
        threads = {} if self.jobs == 1 else {"OMP_NUM_THREADS": str(self.threads)}

        def stop_when_asked() -> None:
            if stop.is_set():
                raise KeyboardInterrupt

        def start(task: Task) -> "Future[int]":
            environment = {**threads, **task.environment}
            return pool.submit(run_process, task.command, task.log, stop_when_asked, environment)

        def wait_some(running: Collection["Future[int]"]) -> Iterable["Future[int]"]:
            return wait(running, POLL_SECONDS, return_when="FIRST_COMPLETED").done

        with ThreadPoolExecutor(self.jobs) as pool:
            try:
                keep_busy(tasks, self.jobs, start, wait_some, lambda future: future.result(), listener)
            except BaseException:
                stop.set()
                raise


def keep_busy(
    tasks: Sequence[Task],
    jobs: int,
    start: Callable[[Task], F],
    wait_some: Callable[[Collection[F]], Iterable[F]],
    code_of: Callable[[F], int],
    listener: Listener,
) -> None:
    """Keeps `jobs` tasks running until all have ended; what stands for a running task is the engine's own."""
    waiting, running = list(tasks), {}
    while waiting or running:
        while waiting and len(running) < jobs:
            task = waiting.pop(0)
            listener.began(task)
            running[start(task)] = task
        done = list(wait_some(list(running)))
        listener.watch()
        for one in done:
            listener.ended(running.pop(one), code_of(one))


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


def log_tail(log: Path, code: int, begin: int = 0) -> str:
    """How a command ended, with the last line it wrote after the first `begin` bytes of the log.

    Example:
        >>> log_tail(Path("/nowhere"), -9)
        'killed by SIGKILL without a word'
    """
    how = f"ended with exit code {code}" if code >= 0 else f"killed by {_signal_name(-code)}"
    text = log.read_bytes()[begin:].decode("utf-8", "replace") if log.exists() else ""
    lines = [line.strip() for line in text.splitlines()]
    last = next((line for line in reversed(lines) if line), None)
    return f"{how}: {last[:500]}" if last else f"{how} without a word"


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
