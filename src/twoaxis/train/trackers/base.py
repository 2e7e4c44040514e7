"""What a tracker is told of a run, and how a tracker is chosen."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from twoaxis.core.config import Config
from twoaxis.core.errors import ConfigError
from twoaxis.train.metrics import StepRecord


class TrackedRun(NamedTuple):
    """The run that a tracker is about to be told of.

    Attributes:
        id: 16 letters and digits that stay with the run folder, so that a resumed run continues the same series.
        folder: of the run.
        config: the recipe as plain data.
        told_steps: steps that this tracker was told in earlier calls; None when the run is new to it.
    """

    id: str
    folder: Path
    config: dict[str, Any]
    told_steps: int | None


@runtime_checkable
class Tracker(Protocol):
    """Receives the numbers of a run beside `metrics.jsonl`; any object with these three methods is one.

    An error in `start` ends the run before its first step. After an error in `log` or `finish` the tracker is told
    nothing more, and the run goes on.

    Example:
        >>> class Loudest:
        ...     largest = 0.0
        ...     def start(self, run): print("began" if run.told_steps is None else "goes on")
        ...     def log(self, step, tokens, values): self.largest = max(self.largest, values["train/grad_norm"])
        ...     def finish(self, result): print(f"largest gradient norm {self.largest}")
        >>> isinstance(Loudest(), Tracker)
        True
    """

    def start(self, run: TrackedRun) -> None:
        """Called once, before the first step of this call."""
        ...

    def log(self, step: int, tokens: int, values: Mapping[str, float]) -> None:
        """Called once for every step of the run, in order, with the values that `series` names.

        Args:
            step: steps taken, this one included.
            tokens: read up to and with this step.
            values: the numbers by the name of their series.
        """
        ...

    def finish(self, result: Mapping[str, Any] | None) -> None:
        """Called once at the end, with the result of a run that has finished or diverged, else with None."""
        ...


class TrackerConfig(Config, ABC):
    """Base of every kind of tracker; its `kind` names the row of the table `TRACKERS`."""

    @abstractmethod
    def build(self) -> Tracker:
        """Makes the tracker; nothing is opened, written or sent before its `start`.

        Raises:
            ConfigError: its package is not installed.
        """


def series(record: StepRecord, tokens_per_step: int) -> dict[str, float]:
    """The numbers of a step by the name of their series; a validation only where there was one.

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
    """Imports the package of a tracker when the tracker is asked for, and not before.

    Raises:
        ConfigError: naming the extra that installs it.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"tracker {kind!r}: its package cannot be imported ({' '.join(str(error).split())}); "
            f"run: pip install 'twoaxis[{kind}]'"
        ) from None
