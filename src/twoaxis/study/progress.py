"""What a study tells while it runs: which run, how fast, and the time that is left for all of them."""

import sys
import time
from typing import IO

from twoaxis.study.folder import Place
from twoaxis.train.progress import duration

LINE_SECONDS = 30.0
"""Seconds between plain lines."""


class StudyProgress:
    """Receives what happens in a study; this base says nothing, and is what to derive from."""

    def start(self, total_runs: int, finished_runs: int, steps: int, tokens_per_step: int) -> None:
        """The study begins with some of its runs finished already."""

    def preparing(self, stage: str, done: int, total: int) -> None:
        """The corpus is being tokenised; `done` of `total` bytes."""

    def begin(self, place: Place, step: int) -> None:
        """A run begins or goes on after some steps."""

    def step(self, step: int) -> None:
        """The current run has taken this many steps."""

    def end(self, place: Place, words: str) -> None:
        """A run has ended in some way."""

    def note(self, text: str) -> None:
        """Something to tell the user, in one line."""

    def stop(self) -> None:
        """The study has ended, or has been stopped."""


class Forecast:
    """Rate and time left, from the pace of this session alone: seconds per step, start-up of runs included."""

    def __init__(self, total_runs: int, finished_runs: int, steps: int, tokens_per_step: int) -> None:
        self.total, self.finished, self.steps, self.tokens_per_step = total_runs, finished_runs, steps, tokens_per_step
        self.begun = time.monotonic()
        self.done = self.run_begun = self.run_step = 0
        self.pace: tuple[int, float] | None = None

    def begin(self, step: int) -> None:
        """A run begins after some steps, which are not of this session."""
        self.run_begun = self.run_step = step
        self.pace = None

    def step(self, step: int) -> None:
        """The current run has taken this many steps."""
        if self.pace is None and step > self.run_begun:
            # The first steps of a run come after its start-up, which is no part of its rate.
            self.pace = step, time.monotonic()
        self.run_step = step

    def end(self) -> None:
        """The current run has ended."""
        self.finished += 1
        self.done += self.run_step - self.run_begun
        self.run_begun = self.run_step

    def words(self) -> str:
        """Rate of the current run and time left for the study."""
        now, taken = time.monotonic(), self.done + self.run_step - self.run_begun
        left = max(0, (self.total - self.finished) * self.steps - self.run_step)
        time_left = f"about {duration(left * (now - self.begun) / taken)} left for the study" if taken else ""
        first, since = self.pace or (self.run_step, now)
        paced = (self.run_step - first) * self.tokens_per_step
        rate = f"{paced / max(now - since, 1e-9):,.0f} tokens/s" if paced else "starting"
        return f"{rate}  {time_left}".rstrip()


class PlainStudyProgress(StudyProgress):
    """Writes a line when a run begins and ends, and now and then between.

    Args:
        stream: where to; None is standard error.
        every_seconds: between lines.
    """

    def __init__(self, stream: IO[str] | None = None, every_seconds: float = LINE_SECONDS) -> None:
        self._stream = stream or sys.stderr
        self._every = every_seconds
        self._next = time.monotonic() + every_seconds
        self._forecast = Forecast(0, 0, 1, 1)
        self._place: Place | None = None

    def start(self, total_runs: int, finished_runs: int, steps: int, tokens_per_step: int) -> None:
        """Says how much there is to do."""
        self._forecast = Forecast(total_runs, finished_runs, steps, tokens_per_step)
        self.note(f"study: {finished_runs} of {total_runs} runs are finished, {steps} steps each")

    def preparing(self, stage: str, done: int, total: int) -> None:
        """Says how far the preparation is."""
        if self._due():
            self.note(f"{stage}: {done / max(total, 1):.0%}")

    def begin(self, place: Place, step: int) -> None:
        """Says which run begins."""
        self._place = place
        self._forecast.begin(step)
        self.note(f"run {self._number()}: {place}" + (f", after step {step}" if step else ""))

    def step(self, step: int) -> None:
        """Says how the run goes, when a line is due."""
        self._forecast.step(step)
        if self._due():
            self.note(f"run {self._number()}: {self._place}: step {step} of {self._forecast.steps}  {self._forecast.words()}")

    def end(self, place: Place, words: str) -> None:
        """Says how a run has ended."""
        self.note(f"run {self._number()}: {place}: {words}")
        self._forecast.end()

    def note(self, text: str) -> None:
        """Writes the text."""
        print(text, file=self._stream, flush=True)

    def _number(self) -> str:
        return f"{min(self._forecast.finished + 1, self._forecast.total)} of {self._forecast.total}"

    def _due(self) -> bool:
        now = time.monotonic()
        due = now >= self._next
        self._next = now + self._every if due else self._next
        return due


class RichStudyProgress(PlainStudyProgress):
    """Draws one bar for the whole study on standard error, with the ends of runs as lines above it."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        super().__init__()
        columns = [TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.fields[words]}")]
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task("study", words="", total=1)

    def start(self, total_runs: int, finished_runs: int, steps: int, tokens_per_step: int) -> None:
        """Draws the bar."""
        super().start(total_runs, finished_runs, steps, tokens_per_step)
        self._bar.start()
        self._bar.update(self._task, total=total_runs * steps, completed=finished_runs * steps)

    def preparing(self, stage: str, done: int, total: int) -> None:
        """Draws how far the preparation is."""
        self._bar.update(self._task, description=stage, words=f"{done / max(total, 1):.0%}")

    def step(self, step: int) -> None:
        """Moves the bar."""
        forecast = self._forecast
        forecast.step(step)
        self._bar.update(
            self._task,
            description=f"run {self._number()}: {self._place}",
            completed=forecast.finished * forecast.steps + step,
            words=f"{step}/{forecast.steps}  {forecast.words()}",
        )

    def note(self, text: str) -> None:
        """Writes the text above the bar."""
        self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def stop(self) -> None:
        """Removes the bar."""
        self._bar.stop()


def console_study_progress() -> StudyProgress:
    """A bar when standard error is a terminal, else plain lines."""
    return RichStudyProgress() if sys.stderr.isatty() else PlainStudyProgress()
