"""What a run tells while it runs: a bar on a terminal, plain lines elsewhere, or nothing."""

import sys
import time
from typing import IO, TYPE_CHECKING, Any

from twoaxis.train.metrics import StepRecord

if TYPE_CHECKING:
    import rich.progress

LINE_SECONDS = 30.0
"""Seconds between plain lines."""


class Progress:
    """Receives what happens in a run; this base says nothing, and is what to derive from."""

    def preparing(self, stage: str, done: int, total: int) -> None:
        """The corpus is being tokenised; `done` of `total` bytes."""

    def start(self, step: int, steps: int, tokens_per_step: int) -> None:
        """Training begins after `step` of `steps`."""

    def step(self, record: StepRecord) -> None:
        """A step has ended."""

    def note(self, text: str) -> None:
        """Something to tell the user, in one or more lines."""

    def stop(self) -> None:
        """The run has ended, or has failed."""


class PlainProgress(Progress):
    """Writes a line now and then.

    Args:
        stream: where to; None is standard error.
        every_seconds: between lines.
    """

    def __init__(self, stream: IO[str] | None = None, every_seconds: float = LINE_SECONDS) -> None:
        self._stream = stream or sys.stderr
        self._every = every_seconds
        self._next = time.monotonic() + every_seconds
        self._pace = Pace(0, 1, 1)

    def preparing(self, stage: str, done: int, total: int) -> None:
        """Says how far the preparation is."""
        if self._due():
            self.note(f"{stage}: {done / max(total, 1):.0%}")

    def start(self, step: int, steps: int, tokens_per_step: int) -> None:
        """Says where the run begins."""
        self._pace = Pace(step, steps, tokens_per_step)
        self.note(f"training: step {step} of {steps}")

    def step(self, record: StepRecord) -> None:
        """Says how the run goes, when a line is due, it is the last step, or there is a validation."""
        self._pace.add(record)
        if record.validation_loss is not None or record.step == self._pace.steps or self._due():
            self.note(f"step {record.step} of {self._pace.steps}: {self._pace.words(record)}")

    def note(self, text: str) -> None:
        """Writes the text."""
        print(text, file=self._stream, flush=True)

    def _due(self) -> bool:
        now = time.monotonic()
        due = now >= self._next
        self._next = now + self._every if due else self._next
        return due


class RichProgress(Progress):
    """Draws a bar on standard error with loss, tokens per second and the time left."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar

        columns = [TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[words]}")]
        self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
        self._task: rich.progress.TaskID | None = None
        self._pace = Pace(0, 1, 1)

    def preparing(self, stage: str, done: int, total: int) -> None:
        """Draws how far the preparation is."""
        self._draw(stage, done, total, f"{done / max(total, 1):.0%}")

    def start(self, step: int, steps: int, tokens_per_step: int) -> None:
        """Draws the bar of the steps."""
        self._pace = Pace(step, steps, tokens_per_step)
        self._draw("training", step, steps, "")

    def step(self, record: StepRecord) -> None:
        """Moves the bar."""
        self._pace.add(record)
        self._draw("training", record.step, self._pace.steps, f"{record.step}/{self._pace.steps}  {self._pace.words(record)}")

    def note(self, text: str) -> None:
        """Writes the text above the bar."""
        self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def stop(self) -> None:
        """Removes the bar."""
        self._bar.stop()

    def _draw(self, description: str, done: int, total: int, words: str) -> None:
        values: dict[str, Any] = {"description": description, "completed": done, "total": total, "words": words}
        if self._task is None:
            self._task = self._bar.add_task(description, words="")
            self._bar.start()
        self._bar.update(self._task, **values)


class Pace:
    """How fast a run goes, from a running mean over its last steps."""

    def __init__(self, step: int, steps: int, tokens_per_step: int) -> None:
        self.step, self.steps, self.tokens_per_step = step, steps, tokens_per_step
        self.seconds = 0.0
        self.validation = ""

    def add(self, record: StepRecord) -> None:
        """Counts one step."""
        self.step = record.step
        self.seconds = record.seconds if not self.seconds else 0.9 * self.seconds + 0.1 * record.seconds
        if record.validation_loss is not None:
            self.validation = f"  validation {record.validation_loss:.4f}"
        if record.validation_accuracy is not None:
            self.validation += f" (accuracy {record.validation_accuracy:.1%})"

    def words(self, record: StepRecord) -> str:
        """Loss, tokens per second and the time left, without validations and checkpoints."""
        rate = self.tokens_per_step / self.seconds if self.seconds else 0.0
        left = duration((self.steps - self.step) * self.seconds)
        return f"loss {record.loss:.4f}{self.validation}  {rate:,.0f} tokens/s  {left} left"


def duration(seconds: float) -> str:
    """Seconds as hours, minutes and seconds.

    Example:
        >>> duration(75), duration(3723)
        ('1:15', '1:02:03')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def console_progress() -> Progress:
    """A bar when standard error is a terminal, else plain lines."""
    return RichProgress() if sys.stderr is not None and sys.stderr.isatty() else PlainProgress()
