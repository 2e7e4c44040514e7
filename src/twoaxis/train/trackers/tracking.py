"""Trackers of a run: how one is chosen, what it receives, and how it is kept from influencing the run."""

import contextlib
import secrets
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

from twoaxis.core.config import Config
from twoaxis.core.errors import ConfigError, TwoAxisError
from twoaxis.train.metrics import Result, StepRecord
from twoaxis.train.progress import Progress
from twoaxis.train.recipe import TrainConfig
from twoaxis.train.run_folder import RunFolder
from twoaxis.train.training_state import random_state, restore_random_state


class TrackedRun(NamedTuple):
    """The run that a tracker receives.

    Attributes:
        id: 16 letters and digits, fixed for the run folder, so that a resumed run continues the same series.
        folder: of the run.
        config: the recipe as plain data.
        logged_steps: steps that this tracker has logged before; None for a new run.
    """

    id: str
    folder: Path
    config: dict[str, Any]
    logged_steps: int | None


@runtime_checkable
class Tracker(Protocol):
    """Receives the metrics of a run; any object with these three methods is a tracker.

    An error in `start` ends the run before its first step. An error in `log` or `finish` removes the tracker, and the run
    continues.

    Example:
        >>> class LargestGradient:
        ...     largest = 0.0
        ...     def start(self, run): print("new" if run.logged_steps is None else "resumed")
        ...     def log(self, step, tokens, values): self.largest = max(self.largest, values["train/grad_norm"])
        ...     def finish(self, result): print(f"largest gradient norm {self.largest}")
        >>> isinstance(LargestGradient(), Tracker)
        True
    """

    def start(self, run: TrackedRun) -> None:
        """Called once, before the first step of this call."""
        ...

    def log(self, step: int, tokens: int, values: Mapping[str, float]) -> None:
        """Called once for every step of the run, in order.

        Args:
            step: steps taken, this one included.
            tokens: read so far, this step included.
            values: numbers by the name of their series; see `series`.
        """
        ...

    def finish(self, result: Mapping[str, Any] | None) -> None:
        """Called once at the end, with the result if the run has finished or diverged."""
        ...


class TrackerConfig(Config, ABC):
    """Base of tracker configurations; `kind` names the row of the table `TRACKERS`."""

    @abstractmethod
    def build(self) -> Tracker:
        """Builds the tracker; nothing is opened, written or sent before `start`.

        Raises:
            ConfigError: its package is not installed.
        """


def series(record: StepRecord, tokens_per_step: int) -> dict[str, float]:
    """The numbers of a step by the name of their series.

    Example:
        >>> series(StepRecord(step=5, loss=2.5, grad_norm=1.0, lr=0.1, tokens=90, seconds=0.5), tokens_per_step=100)
        {'train/loss': 2.5, 'train/grad_norm': 1.0, 'train/lr': 0.1, 'train/tokens_per_second': 200.0}
    """
    values = {
        "train/loss": record.loss,
        "train/grad_norm": record.grad_norm,
        "train/lr": record.lr,
        "train/tokens_per_second": tokens_per_step / record.seconds if record.seconds else None,
        "validation/loss": record.validation_loss,
        "validation/bpb": record.bpb,
        "validation/accuracy": record.validation_accuracy,
    }
    return {name: value for name, value in values.items() if value is not None}


def load(module: str, kind: str) -> Any:
    """Imports the package of a tracker.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"tracker {kind!r}: its package cannot be imported ({' '.join(str(error).split())}); "
            f"run: pip install 'twoaxis[{kind}]'"
        ) from None


class Tracking:
    """Logs every step to every tracker once, however often the run is stopped, killed and resumed.

    A context manager: entering it starts the trackers and logs the earlier steps that they lack; leaving it finishes them.
    The state of torch's random generators is restored after each call, output goes to standard error, and a tracker that fails
    is noted once and removed.

    Args:
        trackers: by name.
        folder: of the run; `trackers/NAME` there counts the steps that a tracker has logged.
        config: the recipe of this call, which may be longer than the one in the folder.
        records: the steps so far, from `metrics.jsonl`.
        tokens_per_step: tokens read in a step.
        progress: receives a note about a tracker that fails.

    Raises:
        ConfigError: on entering, a tracker that cannot be started.
        DataError: on entering, a folder that cannot be written.
    """

    def __init__(
        self,
        trackers: Mapping[str, Tracker],
        folder: RunFolder,
        config: TrainConfig,
        records: Sequence[StepRecord],
        tokens_per_step: int,
        progress: Progress,
    ) -> None:
        self._trackers, self._folder, self._config, self._records = trackers, folder, config, records
        self._tokens_per_step, self._progress = tokens_per_step, progress
        self._logged = {name: LoggedSteps(folder.path / "trackers" / name) for name in trackers}
        self._active: dict[str, Tracker] = {}
        self._result: Result | None = None

    def __enter__(self) -> Self:
        try:
            for name, tracker in self._trackers.items():
                self._start(name, tracker)
        except BaseException:
            self._close()
            raise
        for record in self._records:
            self.log(record)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._close()

    def log(self, record: StepRecord) -> None:
        """Logs a step to every tracker that has not logged it before."""
        for name, tracker in list(self._active.items()):
            logged = self._logged[name]
            if record.step <= logged.steps:
                continue
            with self._guarded(name):
                # Counted first, so that a run killed in between never logs a step twice.
                logged.write(record.step)
                try:
                    tracker.log(record.step, record.step * self._tokens_per_step, series(record, self._tokens_per_step))
                except Exception:
                    logged.write(record.step - 1)
                    raise

    def finish(self, result: Result) -> None:
        """Sets the result that the trackers receive at the end, unless the run was interrupted."""
        self._result = None if result.status == "interrupted" else result

    def _start(self, name: str, tracker: Tracker) -> None:
        self._folder.write_once("tracking", {"run_id": secrets.token_hex(8)})
        logged, identity = self._logged[name], self._folder.read("tracking")["run_id"]
        earlier = logged.steps if logged.path.exists() else None
        run = TrackedRun(identity, self._folder.path, self._config.to_data(), earlier)
        try:
            with _isolated():
                tracker.start(run)
            self._active[name] = tracker
            logged.write(logged.steps)
        except TwoAxisError:
            raise
        except Exception as error:
            raise ConfigError(
                f"tracker {name!r}: cannot be started ({_in_one_line(error)}); repair it, or train without it"
            ) from error

    def _close(self) -> None:
        for name, tracker in list(self._active.items()):
            with self._guarded(name):
                tracker.finish(None if self._result is None else self._result.to_data())
            self._logged[name].close()
        self._active.clear()

    @contextlib.contextmanager
    def _guarded(self, name: str) -> Iterator[None]:
        try:
            with _isolated():
                yield
        except Exception as error:
            del self._active[name]
            self._logged[name].close()
            self._progress.note(
                f"tracker {name!r} failed and is switched off ({_in_one_line(error)}); the run goes on, metrics.jsonl has all"
            )


class LoggedSteps:
    """The number of steps that a tracker has logged, in a file that is intact whenever the process is killed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.steps = int(path.read_bytes())
        except (OSError, ValueError):
            self.steps = 0
        self._file: Any = None

    def write(self, steps: int) -> None:
        """Sets the number."""
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "r+b" if self.path.exists() else "xb", buffering=0)  # noqa: SIM115, closed by `close`
        # One write of fixed length in place takes microseconds, a new file for every step milliseconds.
        self._file.seek(0)
        self._file.write(f"{steps:012}\n".encode())
        self.steps = steps

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


@contextlib.contextmanager
def _isolated() -> Iterator[None]:
    state = random_state()
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        restore_random_state(state)


def _in_one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
