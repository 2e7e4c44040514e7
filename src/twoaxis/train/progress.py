"""Progress of a run: a bar on a terminal, plain lines elsewhere, or nothing."""

import sys
import time
from typing import IO, TYPE_CHECKING, Any

from twoaxis.train.metrics import StepRecord

if TYPE_CHECKING:
    import rich.progress

LINE_SECONDS = 30.0
"""Seconds between plain lines."""


class Progress:
    """Callbacks of a run; the base class shows nothing."""

    def preparing(self, stage: str, done: int, total: int) -> None:
        """Called while the corpus is tokenised: `done` of `total` bytes."""

    def start(self, step: int, steps: int, tokens_per_step: int) -> None:
        """Called before training continues after `step` of `steps`."""

    def step(self, record: StepRecord) -> None:
        """Called after each step."""

    def note(self, text: str) -> None:
        """Called with a message for the user, of one or more lines."""

    def stop(self) -> None:
        """Called when the run has ended or failed."""


class StagePace:
    """The rate of a stage of preparation and the time left for it, since it began."""

    def __init__(self) -> None:
        self._stage, self._first, self._done, self._begun = "", 0, 0, 0.0

    def words(self, stage: str, done: int, total: int) -> str:
        """The share that is done, the rate and the time left.

        Example:
            >>> StagePace().words("encoding", 50, 100)
            '50%'
        """
        now = time.monotonic()
        if stage != self._stage or done < self._done:
            self._stage, self._first, self._begun = stage, done, now
        self._done = done
        share, seconds = f"{done / max(total, 1):.0%}", now - self._begun
        if done == self._first or not seconds:
            return share
        rate = (done - self._first) / seconds
        return f"{share}  {rate:,.{0 if rate >= 10 else 1}f}/s  {duration((total - done) / rate)} left"


class PlainLines:
    """Writes lines to a stream, by default to standard error."""

    def __init__(self, stream: IO[str] | None = None, every_seconds: float = LINE_SECONDS) -> None:
        self._stage = StagePace()
        self._stream = stream or sys.stderr
        self._every = every_seconds
        self._next = time.monotonic() + every_seconds

    def preparing(self, stage: str, done: int, total: int) -> None:
        """Writes the progress of the preparation when a line is due."""
        words = self._stage.words(stage, done, total)
        if self.is_due():
            self.note(f"{stage}: {words}")

    def note(self, text: str) -> None:
        """Writes the text."""
        print(text, file=self._stream, flush=True)

    def is_due(self) -> bool:
        """Whether a line is due; the next one then is after the interval."""
        now = time.monotonic()
        due = now >= self._next
        self._next = now + self._every if due else self._next
        return due


class PlainProgress(PlainLines, Progress):
    """Writes a line at intervals, by default to standard error."""

    def __init__(self, stream: IO[str] | None = None, every_seconds: float = LINE_SECONDS) -> None:
        super().__init__(stream, every_seconds)
        self._pace = Pace(0, 1, 1)

    def start(self, step: int, steps: int, tokens_per_step: int) -> None:
        """Writes the first step."""
        self._pace = Pace(step, steps, tokens_per_step)
        self.note(f"training: step {step} of {steps}")

    def step(self, record: StepRecord) -> None:
        """Writes loss and speed: at intervals, after validations, and at the last step."""
        self._pace.add(record)
        if record.validation_loss is not None or record.step == self._pace.steps or self.is_due():
            self.note(f"step {record.step} of {self._pace.steps}: {self._pace.words(record)}")


class RichProgress(Progress):
    """Draws a bar on standard error with loss, tokens per second and remaining time."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar

        columns = [TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[words]}")]
        self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
        self._task: rich.progress.TaskID | None = None
        self._pace, self._stage = Pace(0, 1, 1), StagePace()

    def preparing(self, stage: str, done: int, total: int) -> None:
        """Draws the progress of the preparation, until a stage has ended."""
        self._draw(stage, done, total, self._stage.words(stage, done, total))
        if done >= total and self._task is not None:
            self._bar.remove_task(self._task)
            self._task = None

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
    """The speed of a run, as a running mean over its last steps."""

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
        """Loss, tokens per second, and remaining time without validations and checkpoints."""
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
    return RichProgress() if is_terminal() else PlainProgress()


def is_terminal() -> bool:
    """Whether standard error is a terminal."""
    return sys.stderr is not None and sys.stderr.isatty()
