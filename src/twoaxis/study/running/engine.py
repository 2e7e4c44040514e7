"""Engines that execute the runs of a study: the interface, and processes on this machine."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import torch

POLL_SECONDS = 0.2
"""Seconds between checks of running tasks."""

F = TypeVar("F")


class Task(NamedTuple):
    """One process to run.

    Attributes:
        name: of the run, for messages.
        command: to run.
        run: its run folder.
        log: the file that receives its standard error.
        environment: variables added to those of this process.
    """

    name: str
    command: tuple[str, ...]
    run: Path
    log: Path
    environment: Mapping[str, str]


class Listener(Protocol):
    """Callbacks about tasks, called from the thread that runs the engine.

    An exception in a callback, including an interrupt, stops the running tasks (each saves a checkpoint) and is raised again.
    """

    def began(self, task: Task) -> None:
        """A task starts."""

    def watch(self) -> None:
        """Called periodically."""

    def note(self, text: str) -> None:
        """A line for the user."""

    def ended(self, task: Task, code: int) -> None:
        """A task has ended with an exit code, negative for a signal."""


class Engine(Protocol):
    """Runs tasks until all have ended, successfully or not.

    Attributes:
        threads: per run, since they may change its last digits; None when unknown before it starts.
    """

    threads: int | None

    def run(self, tasks: Sequence[Task], listener: Listener) -> None:
        """Starts the tasks in this order, as many at once as the engine allows."""


class LocalEngine:
    """Runs processes on this machine.

    Args:
        jobs: number of tasks at once, which share the cores equally.
        processes: of each task, which share its cores.
    """

    def __init__(self, jobs: int = 1, processes: int = 1) -> None:
        self.jobs, at_once = jobs, jobs * processes
        self.threads: int | None = torch.get_num_threads() if at_once == 1 else max(1, (os.cpu_count() or 1) // at_once)
        self._environment = {} if at_once == 1 else {"OMP_NUM_THREADS": str(self.threads)}

    def run(self, tasks: Sequence[Task], listener: Listener) -> None:
        """Runs each task as a process that one thread waits for."""
        stop = threading.Event()

        def raise_if_stopped() -> None:
            if stop.is_set():
                raise KeyboardInterrupt

        def start(task: Task) -> "Future[int]":
            environment = {**self._environment, **task.environment}
            return pool.submit(run_process, task.command, task.log, raise_if_stopped, environment)

        def wait_some(running: Collection["Future[int]"]) -> Iterable["Future[int]"]:
            return wait(running, POLL_SECONDS, return_when="FIRST_COMPLETED").done

        with ThreadPoolExecutor(self.jobs) as pool:
            try:
                keep_busy(tasks, self.jobs, start, wait_some, lambda future: future.result(), listener)
            except BaseException:
                stop.set()
                raise


def launched(command: Sequence[str], processes: int) -> tuple[str, ...]:
    """The command of so many processes on this machine, given that of one, which is `python -m` and a module.

    Example:
        >>> launched(("python", "-m", "twoaxis", "list"), 2)[1:]
        ('-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', '2', '-m', 'twoaxis', 'list')
    """
    if processes == 1:
        return tuple(command)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes))
    return (sys.executable, *launcher, *command[1:])


def keep_busy(
    tasks: Sequence[Task],
    jobs: int,
    start: Callable[[Task], F],
    wait_some: Callable[[Collection[F]], Iterable[F]],
    code_of: Callable[[F], int],
    listener: Listener,
) -> None:
    """Keeps `jobs` tasks running until all have ended; `F` is the engine's handle of a running task."""
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


STOP_SECONDS = 60.0
"""Time for a terminated process to save its checkpoint."""


def run_process(
    command: Sequence[str], log: Path, watch: Callable[[], None], environment: Mapping[str, str] | None = None
) -> int:
    """Runs a command until it ends, with its standard error in `log`; `environment` extends that of this process.

    An exception in `watch`, including an interrupt, terminates the command and is raised again after its end.

    Returns:
        The exit code, negative for a signal.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as file:
        # In a new session, so that Ctrl-C reaches it only from here, and not also from the terminal.
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
    """Describes how a command ended, with its last line after the first `begin` bytes of the log.

    Example:
        >>> log_tail(Path("/nowhere"), -9)
        'killed by SIGKILL without output'
    """
    how = f"ended with exit code {code}" if code >= 0 else f"killed by {_signal_name(-code)}"
    text = log.read_bytes()[begin:].decode("utf-8", "replace") if log.exists() else ""
    lines = [line.strip() for line in text.splitlines()]
    last = next((line for line in reversed(lines) if line), None)
    return f"{how}: {last[:500]}" if last else f"{how} without output"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    # Not SIGINT, which background processes of a shell ignore.
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except BaseException:
        # Too slow, or interrupted a second time; its last checkpoint is complete.
        process.kill()
        process.wait()
