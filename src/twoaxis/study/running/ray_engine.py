"""An engine for a Ray cluster whose machines share the folder of the study; needs the extra `twoaxis[ray]`."""

import os
import signal
import socket
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from twoaxis.core.errors import StudyError
from twoaxis.study.running.engine import POLL_SECONDS, STOP_SECONDS, Listener, Task, keep_busy, run_process
from twoaxis.train.run_folder import RunFolder

RETRIES = 3
"""Restarts of a run whose worker or machine was lost."""

CONNECT_SECONDS = 5.0
"""Time limit for connecting to a cluster."""


class Share(NamedTuple):
    """The resources of every run.

    Attributes:
        jobs: number of runs at once.
        cpus: processors per run, on one machine.
        gpus: per run, a whole number or a fraction of one.
    """

    jobs: int
    cpus: int
    gpus: float


def share_out(machines: Sequence[Mapping[str, float]], jobs: int) -> Share:
    """Finds the largest share at which `jobs` runs fit at once, GPUs before processors; fewer runs if none fits.

    Args:
        machines: resources of each, by CPU and GPU; a run is on one of them.
        jobs: requested number of runs at once.

    Raises:
        StudyError: no machine has a processor to give.

    Example:
        >>> share_out([{"CPU": 1}, {"CPU": 1}], jobs=1), share_out([{"CPU": 16, "GPU": 3}], jobs=2)
        (Share(jobs=1, cpus=1, gpus=0), Share(jobs=2, cpus=8, gpus=1))
    """

    def capacity(cpus: int, gpus: float) -> int:
        found = [int(one.get("CPU", 0) // cpus) for one in machines]
        if gpus:
            # Tolerates rounding of fractions.
            found = [min(n, int(one.get("GPU", 0) / gpus + 1e-6)) for n, one in zip(found, machines, strict=True)]
        return sum(found)

    most_gpus, most_cpus = (int(max((one.get(name, 0) for one in machines), default=0)) for name in ("GPU", "CPU"))
    # Ray keeps four digits, and a fraction must not be rounded up.
    fractions = [1e4 // number / 1e4 for number in range(2, jobs + 1)]
    choices: list[float] = [*range(most_gpus, 0, -1), *fractions] if most_gpus else [0]
    jobs = min(jobs, capacity(1, choices[-1])) or jobs
    gpus = next((one for one in choices if capacity(1, one) >= jobs), choices[-1])
    cpus = next((one for one in range(most_cpus, 1, -1) if capacity(one, gpus) >= jobs), 1)
    if not capacity(cpus, gpus):
        raise StudyError("engine 'ray': no machine of the cluster has a processor to give; start one with `ray start`")
    return Share(min(jobs, capacity(cpus, gpus)), cpus, gpus)


@dataclass(eq=False)
class _Started:
    """A run on the cluster, with the reference of its latest start."""

    task: Task
    reference: Any
    losses: int = 0
    code: int = 0


class RayEngine:
    """Spreads processes over the Ray cluster of RAY_ADDRESS, or one on this machine.

    All machines must see the folder of the study and the Python interpreter under the same paths. A run whose worker or
    machine is lost restarts from its checkpoint, up to three times.

    Args:
        jobs: runs at once, with equal shares of processors and GPUs.

    Raises:
        StudyError: Ray is not installed.
    """

    def __init__(self, jobs: int = 1) -> None:
        try:
            import ray
        except ImportError:
            raise StudyError("engine 'ray': needs the package ray; install it with `pip install 'twoaxis[ray]'`") from None
        self.jobs, self._ray = jobs, ray
        self.threads: int | None = None

    def run(self, tasks: Sequence[Task], listener: Listener) -> None:
        """Keeps `jobs` tasks on the cluster until all have ended.

        Raises:
            StudyError: no cluster is reached, or no machine has a free processor.
        """
        address = self._connect()
        share = self._share()
        room = "" if share.jobs == self.jobs else f", since there is no room for {self.jobs}"
        listener.note(
            f"Ray at {address}: {share.jobs} runs at once{room}, each with {share.cpus} processors and {share.gpus:g} GPUs"
        )
        started: list[_Started] = []

        def start(task: Task) -> _Started:
            started.append(_Started(task, self._submit(task, share)))
            return started[-1]

        def wait_some(running: Collection[_Started]) -> Iterable[_Started]:
            by_reference = {one.reference: one for one in running}
            ready = self._ray.wait(list(by_reference), timeout=POLL_SECONDS)[0]
            return [by_reference[one] for one in ready if self._ended(by_reference[one], listener)]

        try:
            keep_busy(tasks, share.jobs, start, wait_some, lambda one: one.code, listener)
        except BaseException:
            self._stop(started)
            raise

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

    def _share(self) -> Share:
        return share_out([node["Resources"] for node in self._ray.nodes() if node["Alive"]], self.jobs)

    def _submit(self, task: Task, share: Share) -> Any:
        remote = self._ray.remote(max_retries=0, num_cpus=share.cpus, num_gpus=share.gpus)(_run)
        return remote.remote(task, {"OMP_NUM_THREADS": str(share.cpus)})

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
            one.reference = self._submit(one.task, self._share())
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


def _run(task: Task, environment: dict[str, str]) -> int:
    """Runs on a worker; a cancellation arrives as an interrupt, which `run_process` forwards."""
    if not task.log.parent.is_dir():
        raise FileNotFoundError(f"{task.log.parent}: is not shared with this machine")
    # The process of a lost worker may still run.
    waited = False
    while RunFolder(task.run).is_locked:
        if not waited:
            with open(task.log, "ab") as log:
                log.write(b"is still training from an earlier call; waiting for it\n")
        waited = True
        time.sleep(POLL_SECONDS)
    return run_process(task.command, task.log, lambda: None, {**environment, **task.environment})
