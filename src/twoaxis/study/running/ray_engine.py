"""An engine for a Ray cluster whose machines share the folder of the study; needs the extra `twoaxis[ray]`."""

import os
import signal
import socket
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from twoaxis.core.errors import StudyError
from twoaxis.study.running.engine import POLL_SECONDS, STOP_SECONDS, Listener, Task, keep_busy, run_process
from twoaxis.study.running.ray_placement import GPUs, Machines, Share, share_out, waiting_words
from twoaxis.train.run_folder import RunFolder

RETRIES = 3
"""Restarts of a run whose worker or machine was lost."""

CONNECT_SECONDS = 5.0
"""Time limit for connecting to a cluster."""

NOTE_SECONDS = 20.0
"""A run without a place says so after this time, and again each time that the time has doubled."""

PLACE_SECONDS = 600.0
"""Time limit for placing a run while no other run of the study has a place."""

CHECK_SECONDS = 1.0
"""Seconds between questions about the machines while a run waits."""


@dataclass(eq=False)
class _Started:
    """A run on the cluster.

    Attributes:
        task: what runs.
        share: its resources.
        reference: of its latest start.
        since: time of its latest start.
        losses: lost workers so far.
        code: of its end.
        noted: lines of its worker that the user has read.
        next_note: seconds of waiting after which it says so.
    """

    task: Task
    share: Share
    reference: Any
    since: float = field(default_factory=lambda: time.monotonic())
    losses: int = 0
    code: int = 0
    noted: int = 0
    next_note: float = NOTE_SECONDS

    def worker_lines(self) -> list[str]:
        """What its worker has written: the name of the machine, then notes; empty without a place."""
        try:
            return worker_file(self.task).read_text(encoding="utf-8").splitlines()
        except OSError:
            return []


class RayEngine:
    """Spreads processes over the Ray cluster of RAY_ADDRESS, or one on this machine.

    All machines must see the folder of the study and the Python interpreter under the same paths. A run whose worker or
    machine is lost restarts from its checkpoint, up to three times; one that ends by itself, with an error too, does not. A
    run without a place says what it asks for and what the cluster has; after ten minutes without any run of the study in
    place, the study ends.

    Args:
        jobs: runs at once, with equal shares of the processors.
        gpus: whether each run takes a GPU.

    Raises:
        StudyError: Ray is not installed.
    """

    def __init__(self, jobs: int = 1, gpus: GPUs = "available") -> None:
        try:
            import ray
        except ImportError:
            raise StudyError("engine 'ray': needs the package ray; install it with `pip install 'twoaxis[ray]'`") from None
        self.jobs, self._ray = jobs, ray
        self.gpus: GPUs = gpus
        self.threads: int | None = None
        self._in_place = self._checked = 0.0

    def run(self, tasks: Sequence[Task], listener: Listener) -> None:
        """Keeps `jobs` tasks on the cluster until all have ended.

        Raises:
            StudyError: no cluster is reached, no machine can hold a run, or no run finds a place in time.
        """
        address = self._connect()
        share = self._share()
        room = "" if share.jobs == self.jobs else f", since there is no room for {self.jobs}"
        listener.note(f"Ray at {address}: {share.jobs} runs at once{room}, each with {share.words}")
        started: list[_Started] = []

        def start(task: Task) -> _Started:
            started.append(_Started(task, share, self._submit(task, share)))
            return started[-1]

        def wait_some(running: Collection[_Started]) -> Iterable[_Started]:
            by_reference = {one.reference: one for one in running}
            ready = self._ray.wait(list(by_reference), timeout=POLL_SECONDS)[0]
            ended = [by_reference[one] for one in ready if self._ended(by_reference[one], listener)]
            self._watch_places([one for one in running if one not in ended], listener)
            return ended

        self._in_place = self._checked = time.monotonic()
        try:
            keep_busy(tasks, share.jobs, start, wait_some, lambda one: one.code, listener)
        except BaseException:
            self._stop(started)
            raise
        finally:
            for one in started:
                worker_file(one.task).unlink(missing_ok=True)

    def _connect(self) -> str:
        """Connects to the cluster without changing signal handlers; returns its address."""
        # Without an address Ray would reuse the last one, of a cluster that may be gone or not ours.
        address = os.environ.get("RAY_ADDRESS") or "local"
        if self._ray.is_initialized():
            return address
        _check_address(address)
        handler = signal.getsignal(signal.SIGTERM)
        try:
            # No dashboard, hence no usage statistics sent to others.
            self._ray.init(address=address, include_dashboard=False, log_to_driver=False, configure_logging=False)
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
            raise StudyError(f"engine 'ray': cannot use the cluster at {address} ({reason}); {_remedy(address)}") from None
        finally:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, handler)
        return address

    def _machines(self) -> Machines:
        return [node["Resources"] for node in self._ray.nodes() if node["Alive"]]

    def _share(self) -> Share:
        return share_out(self._machines(), self.jobs, self.gpus)

    def _submit(self, task: Task, share: Share) -> Any:
        worker_file(task).unlink(missing_ok=True)
        remote = self._ray.remote(max_retries=0, num_cpus=share.cpus, num_gpus=share.gpus)(_run)
        return remote.remote(task, {"OMP_NUM_THREADS": str(share.cpus)})

    def _submit_again(self, one: _Started, share: Share) -> None:
        one.share, one.reference, one.since = share, self._submit(one.task, share), time.monotonic()
        one.noted, one.next_note = 0, NOTE_SECONDS

    def _watch_places(self, running: Collection[_Started], listener: Listener) -> None:
        """Passes on notes of workers, and says which runs have no place and why.

        Raises:
            StudyError: no run has had a place for too long, or no machine that is left can hold one.
        """
        now, waiting = time.monotonic(), list[_Started]()
        for one in running:
            lines = one.worker_lines()
            if not lines:
                waiting.append(one)
                continue
            self._in_place = now
            for line in lines[1:][one.noted :]:
                listener.note(f"{one.task.name} on {lines[0]}: {line}")
                one.noted += 1
        if not running:
            self._in_place = now
        if not waiting or now - self._checked < CHECK_SECONDS:
            return
        self._checked = now
        machines = self._machines()
        for one in waiting:
            if not any(one.share.fits(machine) for machine in machines):
                # Its machine has left; raises where no other can take its place.
                share = self._share()
                listener.note(f"{one.task.name}: no machine is left with {one.share.words}; asks for {share.words}")
                self._ray.cancel(one.reference, force=False)
                self._submit_again(one, share)
                continue
            seconds = now - one.since
            too_long = now - max(self._in_place, one.since) >= PLACE_SECONDS
            if too_long or seconds >= one.next_note:
                words = waiting_words(one.share, machines, self._ray.available_resources())
                if too_long:
                    raise StudyError(f"{one.task.name}: has waited {seconds:.0f} s for a place; {words}")
                listener.note(f"{one.task.name}: has waited {seconds:.0f} s for a place; {words}")
                one.next_note *= 2

    def _ended(self, one: _Started, listener: Listener) -> bool:
        """Whether a run has ended; restarts it if it was lost."""
        lost = self._ray.exceptions
        try:
            one.code = self._ray.get(one.reference)
        except lost.RayTaskError as error:
            # The run did not start; its message is read from the log.
            with open(one.task.log, "ab") as log:
                log.write(f"{getattr(error, 'cause', error)}\n".encode(errors="backslashreplace"))
            one.code = 1
        except lost.RayError as error:
            if one.losses == RETRIES:
                one.code = -signal.SIGKILL
                return True
            one.losses += 1
            listener.note(f"{one.task.name}: lost ({type(error).__name__}); starts again, {one.losses} of {RETRIES} times")
            # The rest of the cluster may be too small for the former share.
            self._submit_again(one, self._share())
            return False
        return True

    def _stop(self, started: list[_Started]) -> None:
        """Cancels running tasks and waits until they have saved and ended."""
        references = [one.reference for one in started]
        for reference in references:
            self._ray.cancel(reference, force=False)
        if references:
            self._ray.wait(references, num_returns=len(references), timeout=STOP_SECONDS)


def _check_address(address: str) -> None:
    """Refuses an address without a listener, for which Ray would wait more than a minute.

    Raises:
        StudyError: naming it.
    """
    parts = urlsplit(address if "://" in address else f"//{address}")
    try:
        if parts.hostname is None or parts.port is None:
            return
        socket.create_connection((parts.hostname, parts.port), CONNECT_SECONDS).close()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise StudyError(f"RAY_ADDRESS={address!r}: no cluster answers there ({reason}); {_remedy(address)}") from None


def _remedy(address: str) -> str:
    return "free memory, or use --engine local" if address == "local" else "start it with `ray start`, or unset RAY_ADDRESS"


def worker_file(task: Task) -> Path:
    """Where a worker writes the name of its machine, and notes; it exists while a run has a place."""
    return task.log.with_suffix(".worker")


def _run(task: Task, environment: dict[str, str]) -> int:
    """Runs on a worker; a cancellation arrives as an interrupt, which `run_process` forwards."""
    if not task.log.parent.is_dir():
        raise FileNotFoundError(f"{task.log.parent}: is not shared with this machine")
    with open(worker_file(task), "w", encoding="utf-8") as said:
        said.write(f"{socket.gethostname()}\n")
        said.flush()
        # The process of a lost worker may still run.
        if RunFolder(task.run).is_locked:
            note = "is still training from an earlier call; waiting for it\n"
            said.write(note)
            with open(task.log, "a", encoding="utf-8") as log:
                log.write(note)
    while RunFolder(task.run).is_locked:
        time.sleep(POLL_SECONDS)
    return run_process(task.command, task.log, lambda: None, {**environment, **task.environment})
