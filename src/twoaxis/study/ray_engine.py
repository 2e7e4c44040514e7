"""Runs of a study on a Ray cluster whose machines share the folder of the study; needs the extra `twoaxis[ray]`."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from twoaxis.core.errors import StudyError
from twoaxis.study.engine import POLL_SECONDS, Listener, Task, keep_busy
from twoaxis.study.process import PATIENCE_SECONDS, run_process


class RayEngine:
    """Spreads processes over a Ray cluster: that of RAY_ADDRESS, or one of this machine alone.

    The files are those of the local engine, since every run writes its own folder: all machines must see the folder of the
    study under the same path, and have the same Python at the same place.

    Args:
        jobs: runs at once; the cluster's processors, and GPUs where there are any, are shared out between them.

    Raises:
        StudyError: Ray is not installed.
    """

    def __init__(self, jobs: int = 1) -> None:
        try:
            import ray
        except ImportError:
            raise StudyError("engine 'ray': needs the package ray; install it with `pip install 'twoaxis[ray]'`") from None
        self.jobs, self._ray = jobs, ray
        # What a machine of the cluster has is known once it is reached.
        self.threads: int | None = None

    def run(self, tasks: Sequence[Task], listener: Listener) -> None:
        """Keeps `jobs` tasks on the cluster until all have ended."""
        ray = self._ray
        if not ray.is_initialized():
            # Usage statistics would be sent to others, and nobody has asked for that.
            ray.init(include_dashboard=False, log_to_driver=False, configure_logging=False)
        resources = ray.cluster_resources()
        share = {"num_cpus": max(1, int(resources.get("CPU", 1) // self.jobs)), "num_gpus": resources.get("GPU", 0) / self.jobs}
        remote = ray.remote(max_retries=0, **share)(_run)
        threads = {"OMP_NUM_THREADS": str(share["num_cpus"])}
        started: list[Any] = []

        def start(task: Task) -> Any:
            started.append(remote.remote(task, threads))
            return started[-1]

        def wait_some(running: Collection[Any]) -> Iterable[Any]:
            return ray.wait(list(running), timeout=POLL_SECONDS)[0]

        try:
            keep_busy(tasks, self.jobs, start, wait_some, self._code, listener)
        except BaseException:
            self._stop(started)
            raise

    def _code(self, reference: Any) -> int:
        """The exit code, or that of a process killed from outside when its machine or its worker was lost."""
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayError:
            return -9

    def _stop(self, started: list[Any]) -> None:
        """Asks what still runs to save and end, and waits for it."""
        for reference in started:
            self._ray.cancel(reference, force=False)
        if started:
            self._ray.wait(started, num_returns=len(started), timeout=PATIENCE_SECONDS)


def _run(task: Task, environment: dict[str, str]) -> int:
    """Runs on a worker; a cancellation arrives as an interrupt, which `run_process` passes on."""
    if not task.log.parent.is_dir():
        raise FileNotFoundError(f"{task.log.parent}: is not shared with this machine")
    return run_process(task.command, task.log, lambda: None, {**environment, **task.environment})
