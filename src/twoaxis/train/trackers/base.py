"""The interface of a tracker, and the base of tracker configurations."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from twoaxis.core.config import Config
from twoaxis.core.errors import ConfigError
from twoaxis.train.metrics import StepRecord


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
