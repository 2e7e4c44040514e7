"""Running a study: every arm and replicate in a process of its own, resumable at any moment."""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from twoaxis.core.errors import TwoAxisError
from twoaxis.data import prepare
from twoaxis.study.design import StudyConfig
from twoaxis.study.folder import Place, RunRecord, StudyFolder, places, tokens_per_step, write_json
from twoaxis.study.process import last_words, run_process
from twoaxis.study.progress import StudyProgress

Command = Callable[[Path, Path], list[str]]
"""Makes the command that trains the recipe in a file in a run folder."""

DONE = ("finished", "diverged")
"""How runs end that are not run again."""


def train_command(recipe: Path, run_dir: Path) -> list[str]:
    """The command line that trains one recipe.

    Example:
        >>> train_command(Path("recipe.json"), Path("run"))[1:]
        ['-m', 'twoaxis', 'train', 'recipe.json', '--run', 'run']
    """
    return [sys.executable, "-m", "twoaxis", "train", str(recipe), "--run", str(run_dir)]


def run_study(
    study: StudyConfig, folder: Path | str, *, progress: StudyProgress | None = None, command: Command = train_command
) -> dict[Place, RunRecord]:
    """Runs what the folder does not hold yet, and returns the record of every run.

    Runs that have finished or diverged are kept, runs that were stopped or killed are resumed. A run whose process
    fails is recorded with its last words and the others go on; the next call tries it again. An interrupt (SIGINT or
    SIGTERM) is passed on to the current run, which saves a checkpoint; everything can be resumed afterwards.

    Args:
        study: the design.
        folder: of the study, made if it does not exist.
        progress: told what happens; None tells nobody.
        command: makes the command of one run.

    Raises:
        StudyError: the folder holds another study, or another process runs it.
        DataError: the corpus or the tokenizer cannot be used.
        KeyboardInterrupt: the study was stopped.
    """
    progress = progress or StudyProgress()
    place_in = StudyFolder(folder)
    try:
        with place_in.locked(), _termination_as_interrupt():
            place_in.decide(study)
            _run_all(study, place_in, progress, command)
            return {place: place_in.record(place) for place in places(study)}
    finally:
        progress.stop()


def _run_all(study: StudyConfig, folder: StudyFolder, progress: StudyProgress, command: Command) -> None:
    records = [folder.record(place) for place in places(study)]
    open_places = [record.place for record in records if record.status not in DONE]
    recipe = study.recipe(*records[0].place)
    progress.start(len(records), len(records) - len(open_places), recipe.steps, tokens_per_step(recipe))
    if open_places:
        # Here rather than in the first run, whose peak memory would else be that of training a tokenizer.
        prepare(recipe.data.corpus, recipe.data.tokenizer, progress=progress.preparing)
    for place in open_places:
        _run_one(study, folder, place, progress, command)


def _run_one(study: StudyConfig, folder: StudyFolder, place: Place, progress: StudyProgress, command: Command) -> None:
    run, recipe, log = folder.run(place), folder.recipe(place), folder.log(place)
    write_json(recipe, study.recipe(*place).to_data())
    folder.failure(place).unlink(missing_ok=True)
    begin = log.stat().st_size if log.exists() else 0
    steps = LineCount(run.metrics)
    progress.begin(place, steps.count())
    code = run_process(command(recipe, run.path), log, lambda: progress.step(steps.count()))
    progress.step(steps.count())
    try:
        result, message = run.result, last_words(log, code, begin)
    except TwoAxisError as error:
        result, message = None, str(error)
    if result is not None:
        loss = "" if result.validation_loss is None else f", validation loss {result.validation_loss:.4f} nats per token"
        progress.end(place, result.message + loss)
    else:
        write_json(folder.failure(place), {"exit_code": code, "message": message})
        progress.end(place, f"failed, the others go on: {message}")


class LineCount:
    """Counts the lines of a growing file without reading any of it twice."""

    def __init__(self, path: Path) -> None:
        self.path, self._at, self._lines = path, 0, 0

    def count(self) -> int:
        """Lines so far; counts anew when the file became shorter."""
        try:
            with open(self.path, "rb") as file:
                if file.seek(0, 2) < self._at:
                    self._at = self._lines = 0
                file.seek(self._at)
                new = file.read()
        except OSError:
            return 0
        self._at += len(new)
        self._lines += new.count(b"\n")
        return self._lines


@contextmanager
def _termination_as_interrupt() -> Iterator[None]:
    """Treats SIGTERM like Ctrl-C; outside the main thread, where Python cannot, it does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        del number, frame
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
