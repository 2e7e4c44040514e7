"""Progress of a running study: the current run, its rate, and the time left for all runs."""

import contextlib
import time
from pathlib import Path
from typing import IO

from twoaxis.study.running.study_folder import RunKey
from twoaxis.train.progress import LINE_SECONDS, PlainLines, duration, is_terminal


class StudyProgress:
    """Progress callbacks of a study; the base class does nothing."""

    def start(self, total_runs: int, finished_runs: int, total_steps: int, finished_steps: int, tokens_per_step: int) -> None:
        """The study starts, with some runs finished before."""

    def more(self, runs: int, steps: int) -> None:
        """Runs were added to the plan, with this number of steps in all."""

    def preparing(self, stage: str, done: int, total: int) -> None:
        """The corpus is being tokenised; `done` of `total` bytes."""

    def begin(self, key: RunKey, steps: int, step: int) -> None:
        """A run starts, or resumes at a step."""

    def step(self, key: RunKey, step: int) -> None:
        """A run has reached a step."""

    def end(self, key: RunKey, words: str) -> None:
        """A run has ended."""

    def note(self, text: str) -> None:
        """A line for the user."""

    def stop(self) -> None:
        """The study has ended or was stopped."""


class Forecast:
    """Estimates rate and time left from the steps of this call, start-up of runs included."""

    def __init__(
        self, total_runs: int, finished_runs: int, total_steps: int, finished_steps: int, tokens_per_step: int
    ) -> None:
        self.total, self.finished, self.tokens_per_step = total_runs, finished_runs, tokens_per_step
        self.total_steps, self.finished_steps = total_steps, finished_steps
        self.begun = time.monotonic()
        self.taken = 0
        self.running: dict[RunKey, tuple[int, int, int]] = {}

    def begin(self, key: RunKey, steps: int, step: int) -> None:
        """Starts counting a run that resumes at a step."""
        self.running[key] = (steps, step, step)

    def step(self, key: RunKey, step: int) -> None:
        """Sets the step of a run."""
        steps, begin, _ = self.running[key]
        self.running[key] = (steps, begin, step)

    def end(self, key: RunKey) -> None:
        """Moves a run to the finished ones."""
        steps, begin, now = self.running.pop(key)
        self.finished += 1
        self.finished_steps += steps
        self.taken += now - begin

    @property
    def steps_now(self) -> int:
        """Steps of all runs so far."""
        return self.finished_steps + sum(now for _, _, now in self.running.values())

    def words(self) -> str:
        """Formats the rate and the time left."""
        seconds = time.monotonic() - self.begun
        taken = self.taken + sum(now - begin for _, begin, now in self.running.values())
        if not taken:
            return "starting"
        left = max(0, self.total_steps - self.steps_now)
        rate = taken * self.tokens_per_step / max(seconds, 1e-9)
        return f"{rate:,.0f} tokens/s  about {duration(left * seconds / taken)} left for the study"


class PlainStudyProgress(PlainLines, StudyProgress):
    """Writes lines to a stream (standard error by default): at the start and end of runs, and every few seconds."""

    def __init__(self, stream: IO[str] | None = None, every_seconds: float = LINE_SECONDS) -> None:
        super().__init__(stream, every_seconds)
        self._forecast = Forecast(0, 0, 1, 0, 1)

    def start(self, total_runs: int, finished_runs: int, total_steps: int, finished_steps: int, tokens_per_step: int) -> None:
        """Writes the number of runs."""
        self._forecast = Forecast(total_runs, finished_runs, total_steps, finished_steps, tokens_per_step)
        self.note(f"study: {finished_runs} of {total_runs} runs are finished")

    def more(self, runs: int, steps: int) -> None:
        """Adds to the forecast."""
        self._forecast.total += runs
        self._forecast.total_steps += steps

    def begin(self, key: RunKey, steps: int, step: int) -> None:
        """Writes the name of the run."""
        self._forecast.begin(key, steps, step)
        self.note(f"run {self._number()}: {key}, {steps} steps" + (f", after step {step}" if step else ""))

    def step(self, key: RunKey, step: int) -> None:
        """Writes the step when a line is due."""
        self._forecast.step(key, step)
        if self.is_due():
            self.note(f"{self._running()}  {self._forecast.words()}")

    def end(self, key: RunKey, words: str) -> None:
        """Writes the outcome of the run."""
        self._forecast.end(key)
        self.note(f"{self._forecast.finished} of {self._forecast.total} runs: {key}: {words}")

    def _number(self) -> str:
        forecast = self._forecast
        return f"{min(forecast.finished + len(forecast.running), forecast.total)} of {forecast.total}"

    def _running(self) -> str:
        running = self._forecast.running.items()
        return ", ".join(f"{key}: step {now} of {steps}" for key, (steps, _, now) in running)


class RichStudyProgress(PlainStudyProgress):
    """Draws one bar for the study on standard error, with lines about runs above it."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        super().__init__()
        columns = [TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.fields[words]}")]
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task("study", words="", total=1)

    def start(self, total_runs: int, finished_runs: int, total_steps: int, finished_steps: int, tokens_per_step: int) -> None:
        """Draws the bar."""
        super().start(total_runs, finished_runs, total_steps, finished_steps, tokens_per_step)
        self._bar.start()
        self._bar.update(self._task, total=total_steps, completed=finished_steps)

    def more(self, runs: int, steps: int) -> None:
        """Lengthens the bar."""
        super().more(runs, steps)
        self._bar.update(self._task, total=self._forecast.total_steps)

    def preparing(self, stage: str, done: int, total: int) -> None:
        """Draws the progress of the preparation."""
        self._bar.update(self._task, description=stage, words=self._stage.words(stage, done, total))

    def step(self, key: RunKey, step: int) -> None:
        """Moves the bar."""
        forecast = self._forecast
        forecast.step(key, step)
        self._bar.update(
            self._task,
            description=f"run {self._number()}: {', '.join(map(str, forecast.running))}",
            completed=forecast.steps_now,
            words=forecast.words(),
        )

    def note(self, text: str) -> None:
        """Writes the text above the bar."""
        self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def stop(self) -> None:
        """Removes the bar."""
        self._bar.stop()


class LineCount:
    """Counts the lines of a growing file, reading each byte once."""

    def __init__(self, path: Path) -> None:
        self.path, self._at, self._lines = path, 0, 0

    def count(self) -> int:
        """Returns the number of lines; starts anew when the file became shorter."""
        with contextlib.suppress(OSError), open(self.path, "rb") as file:
            if file.seek(0, 2) < self._at:
                self._at = self._lines = 0
            file.seek(self._at)
            new = file.read()
            self._at += len(new)
            self._lines += new.count(b"\n")
            return self._lines
        return 0


def console_study_progress() -> StudyProgress:
    """Returns a bar when standard error is a terminal, else plain lines."""
    return RichStudyProgress() if is_terminal() else PlainStudyProgress()
