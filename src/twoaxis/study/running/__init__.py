"""Runs a study: every arm and replicate in a separate process, resumable at any time."""

import json
import platform
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from twoaxis.core.errors import StudyError, TwoAxisError
from twoaxis.core.interrupt import termination_as_interrupt
from twoaxis.data import prepare
from twoaxis.study.design import StudyConfig
from twoaxis.study.design.rules import TuningConfig
from twoaxis.study.planning import plan_study
from twoaxis.study.planning.equal_cost import tokens_per_step
from twoaxis.study.planning.study_plan import PlannedArm, StudyPlan
from twoaxis.study.report_data import DONE
from twoaxis.study.running.engine import Engine, LocalEngine, Task, launched, log_tail, run_process
from twoaxis.study.running.run_cache import RunCache
from twoaxis.study.running.study_folder import RunKey, RunRecord, StudyFolder, run_keys, write_json
from twoaxis.study.running.study_progress import LineCount, StudyProgress
from twoaxis.study.timing import Timer, Timing
from twoaxis.train.environment import prepare_kernels
from twoaxis.train.recipe import TrainConfig
from twoaxis.train.token_loss import choose_device

Command = Callable[[Path, Path], list[str]]
"""Makes the command that trains a recipe file into a run folder."""

WAIT_SECONDS = 0.5
"""Seconds between checks of a run that an earlier call started."""


def train_command(recipe: Path, run_dir: Path) -> list[str]:
    """The command line that trains one recipe.

    Example:
        >>> train_command(Path("recipe.json"), Path("run"))[1:]
        ['-m', 'twoaxis', 'train', 'recipe.json', '--folder', 'run']
    """
    # Not --run, which torchrun takes for its own.
    return [sys.executable, "-m", "twoaxis", "train", str(recipe), "--folder", str(run_dir)]


def run_study(
    study: StudyConfig,
    folder: Path | str,
    *,
    progress: StudyProgress | None = None,
    engine: Engine | None = None,
    command: Command = train_command,
    timer: Timer | None = None,
    command_line: str = "",
) -> dict[RunKey, RunRecord]:
    """Makes the runs that the folder lacks, and returns the records of all.

    Stopped and killed runs are resumed. A failed run is recorded with the last line of its log, and tried again by the next
    call. SIGINT and SIGTERM are forwarded to the runs, which save a checkpoint.

    Args:
        study: the design.
        folder: of the study, created if missing.
        progress: callbacks.
        engine: executes the runs; None runs them one after another on this machine.
        command: makes the command of one run.
        timer: measures seconds of steps before the first run and after the last; None measures in a separate process.
        command_line: recorded for the report.

    Raises:
        StudyError: the folder holds another study, or another process runs it.
        DataError: the corpus or the tokenizer cannot be used.
        KeyboardInterrupt: the study was stopped.
    """
    progress, engine = progress or StudyProgress(), engine or LocalEngine(processes=study.processes)
    study_folder = StudyFolder(folder)
    try:
        with study_folder.locked(), termination_as_interrupt():
            study_folder.decide(study)
            if command_line:
                study_folder.keep_command(command_line)
            if not study_folder.has_plan:
                study_folder.keep_plan(measured_plan(study, study_folder.path, progress, timer))
                for note in study_folder.plan.notes:
                    progress.note(note)
            timer = timer or _process_timer(study_folder.path, progress)
            measure_where_moved(study_folder, timer)
            session = _Session(study_folder.plan, study_folder, progress, engine, command)
            session.run()
            measure_again(study_folder, timer, anew=session.has_run)
            return {key: study_folder.record(key) for key in run_keys(study_folder.plan)}
    finally:
        progress.stop()


def measured_plan(study: StudyConfig, folder: Path, progress: StudyProgress, timer: Timer | None = None) -> StudyPlan:
    """Plans a study with measured seconds, and writes the timing into the folder.

    Raises:
        ConfigError: arms that cannot be matched.
        DataError: the corpus or the tokenizer cannot be used.
        StudyError: an arm cannot be measured.
    """
    recipe = study.recipe(study.control, study.replicates[0])
    # Before the first run, so that its peak memory does not include training a tokenizer, nor its time a compiler.
    prepare(recipe.data.corpus, recipe.data.tokenizer, progress=progress.preparing)
    prepare_kernels(choose_device(recipe.device), progress.note)
    return plan_study(study, timer or _process_timer(folder, progress))


def _process_timer(folder: Path, progress: StudyProgress) -> Timer:
    """Makes a timer that measures in a separate process; StudyError if that fails."""

    def measure(recipes: Mapping[str, TrainConfig]) -> Timing:
        progress.note(f"measuring the seconds of a step of {len(recipes)} arms, in turns")
        given, got, log = (folder / f"timing.{name}" for name in ("recipes.json", "json", "log"))
        write_json(given, {name: recipe.to_data() for name, recipe in recipes.items()})
        got.unlink(missing_ok=True)
        processes = next(iter(recipes.values())).parallel.ranks
        command = launched((sys.executable, "-m", "twoaxis.study.timing", str(given), str(got)), processes)
        code = run_process(command, log, lambda: None)
        if code:
            raise StudyError(f"timing: {log_tail(log, code)}; correct the arm, and run the study again")
        return Timing.from_data(json.loads(got.read_text(encoding="utf-8")))

    return measure


def measure_where_moved(folder: StudyFolder, timer: Timer) -> bool:
    """Measures seconds anew if runs are left and the study has moved to another machine; returns whether it did.

    So that both timings that are compared are of one machine.
    """
    before, here = folder.timing_before, platform.platform()
    if before is None or before.environment.get("platform", here) == here or _all_are(folder, DONE):
        return False
    folder.keep_timing_before(_timed(folder, before, timer))
    return True


def measure_again(folder: StudyFolder, timer: Timer, anew: bool = False) -> bool:
    """Measures seconds a second time once all runs have ended or failed; returns whether it did.

    With `anew`, runs have been made since the last time, if there was one. Where the second timing is of another machine than
    the first, it becomes the first of that machine.
    """
    before, after = folder.timing_before, folder.timing_after
    # A run that fails may fail for ever.
    if before is None or not _all_are(folder, (*DONE, "failed")):
        return False
    here = after is None or after.is_of_machine_of(before)
    if after is not None and here and not anew:
        return False
    again = _timed(folder, before, timer)
    if after is not None and not here:
        folder.keep_timing_before(after)
    folder.keep_timing_after(again)
    return True


def _all_are(folder: StudyFolder, statuses: Sequence[str]) -> bool:
    return all(folder.record(key).status in statuses for key in run_keys(folder.plan))


def _timed(folder: StudyFolder, before: Timing, timer: Timer) -> Timing:
    """The same arms as before, timed now."""
    arms = [folder.plan.arm(name) for name in before.seconds]
    return timer({arm.name: folder.recipe_of(arm, arm.seeds[0]) for arm in arms})


class _Session:
    """One call of `run_study`; the listener of its engine."""

    def __init__(self, plan: StudyPlan, folder: StudyFolder, progress: StudyProgress, engine: Engine, command: Command) -> None:
        self.plan, self.folder, self.progress, self.engine, self.command = plan, folder, progress, engine, command
        self.order = run_keys(plan)
        self.cache = RunCache(folder, engine.threads)
        self.counts: dict[str, LineCount] = {}
        self.logs: dict[str, int] = {}
        self.has_run = False

    def run(self) -> None:
        """Runs trials, chooses learning rates, and runs everything else."""
        self.folder.check([key for key in self.order if self._role(key) == "trial" or self._tuned])
        done = [key for key in self.order if self._is_done(key)]
        steps = sum(self.plan.arm(key.arm).steps for key in self.order)
        steps_done = sum(self.plan.arm(key.arm).steps for key in done)
        control = self.plan.control
        tokens = tokens_per_step(control.train_config(control.seeds[0]))
        self.progress.start(len(self.order), len(done), steps, steps_done, tokens)
        self._wait_for_earlier_runs([key for key in self.order if key not in done])
        self._run(self._trials)
        if not self._tuned:
            while self._widen():
                self._run(self._trials)
            records = [self.folder.record(key) for key in self._trials]
            self.folder.keep_learning_rates(choose_learning_rates(self.plan, records))
        self._run([key for key in self.order if self._role(key) != "trial"])

    @property
    def _trials(self) -> list[RunKey]:
        return [key for key in self.order if self._role(key) == "trial"]

    def _widen(self) -> bool:
        """Adds trials outside the grid to the plan; returns whether there are any."""
        tuning = self.folder.study.tuning
        if tuning is None:
            return False
        added = wider_trials(self.plan, tuning, [self.folder.record(key) for key in self._trials])
        for arm in added:
            self.progress.note(f"{arm.tuned_as}: the best learning rate so far is at the end of its grid; adds {arm.why}")
        self.plan = self.plan.replace(arms=(*self.plan.arms, *added))
        self.folder.keep_plan(self.plan)
        self.order = run_keys(self.plan)
        self.progress.more(len(added), sum(arm.steps for arm in added))
        return bool(added)

    def _wait_for_earlier_runs(self, order: Sequence[RunKey]) -> None:
        """Waits for runs that outlived a killed call."""
        for key in order:
            noted = False
            while self.folder.run(key).is_locked:
                if not noted:
                    self.progress.note(f"{key}: is still training from an earlier call; waiting for it")
                noted = True
                time.sleep(WAIT_SECONDS)

    @property
    def _tuned(self) -> bool:
        """Whether every arm has its learning rate."""
        return not self.plan.of_role("trial") or bool(self.folder.learning_rates)

    def _role(self, key: RunKey) -> str:
        return self.plan.arm(key.arm).role

    def _is_done(self, key: RunKey) -> bool:
        return self.folder.record(key).status in DONE

    def _run(self, order: Sequence[RunKey]) -> None:
        tasks, self.by_name = [], {}
        for key in order:
            arm = self.plan.arm(key.arm)
            if self._is_done(key):
                continue
            if arm.role != "trial" and arm.tuned_as and arm.tuned_as not in self.folder.learning_rates:
                message = f"no learning rate of {arm.tuned_as} trained; the trials are not repeated"
                write_json(self.folder.failure(key), {"exit_code": None, "message": message})
                continue
            recipe = self.folder.recipe_of(arm, key.seed)
            if found := self.cache.lookup(recipe, key):
                self.progress.begin(key, recipe.steps, recipe.steps)
                self.progress.end(key, f"reuses the same run in {found}")
                continue
            tasks.append(self._task(key, recipe))
            self.by_name[str(key)] = key
        if tasks:
            self.has_run = True
            self.engine.run(tasks, self)

    def _task(self, key: RunKey, recipe: TrainConfig) -> Task:
        write_json(self.folder.recipe(key), recipe.to_data())
        run = self.folder.run(key).path.resolve()
        command = launched(self.command(self.folder.recipe(key).resolve(), run), self.folder.study.processes)
        return Task(str(key), command, run, self.folder.log(key).resolve(), {})

    def began(self, task: Task) -> None:
        """Records the start of a run."""
        key = self.by_name[task.name]
        self.folder.failure(key).unlink(missing_ok=True)
        self.logs[task.name] = task.log.stat().st_size if task.log.exists() else 0
        self.counts[task.name] = LineCount(self.folder.run(key).metrics)
        self.progress.begin(key, self.plan.arm(key.arm).steps, self.counts[task.name].count())

    def watch(self) -> None:
        """Reports the steps of all runs."""
        for name, count in self.counts.items():
            self.progress.step(self.by_name[name], count.count())

    def note(self, text: str) -> None:
        """Forwards a note."""
        self.progress.note(text)

    def ended(self, task: Task, code: int) -> None:
        """Reports the end of a run, and records the failure if it left no result."""
        key, count = self.by_name[task.name], self.counts.pop(task.name)
        self.progress.step(key, count.count())
        try:
            result, message = self.folder.run(key).result, log_tail(task.log, code, self.logs[task.name])
        except TwoAxisError as error:
            result, message = None, str(error)
        if result is not None:
            loss = "" if result.validation_loss is None else f", validation loss {result.validation_loss:.4f} nats per token"
            self.progress.end(key, result.message + loss)
        else:
            write_json(self.folder.failure(key), {"exit_code": code, "message": message})
            self.progress.end(key, f"failed, other runs continue: {message}")


def choose_learning_rates(plan: StudyPlan, trials: Iterable[RunRecord]) -> dict[str, float]:
    """Chooses for every arm the learning rate with the lowest validation loss; of equal ones the smallest.

    Diverged trials are ignored; an arm with no other trial is left out.

    Raises:
        StudyError: a trial has neither finished nor diverged.
    """
    found = trial_losses(plan, trials)
    return {arm: best for arm, losses in found.items() if (best := best_rate(losses)) is not None}


def wider_trials(plan: StudyPlan, tuning: TuningConfig, trials: Iterable[RunRecord]) -> list[PlannedArm]:
    """Adds a trial for each arm whose best learning rate is at the end of its grid, at most `tuning.widen` per arm.

    Raises:
        StudyError: a trial has neither finished nor diverged.
    """
    found = []
    for name, losses in trial_losses(plan, trials).items():
        lr = next_rate(losses)
        if lr is not None and len(losses) < len(tuning.lr) + tuning.widen:
            found.append(plan.arm(name).as_trial(lr, tuning.seed, tuning.tokens))
    return found


def best_rate(losses: Mapping[float, float | None]) -> float | None:
    """Returns the learning rate with the lowest loss, of equal ones the smallest; None where all diverged.

    Example:
        >>> best_rate({0.001: 3.2, 0.003: 3.1, 0.01: None})
        0.003
    """
    trained = [(loss, lr) for lr, loss in losses.items() if loss is not None]
    return min(trained)[1] if trained else None


def next_rate(losses: Mapping[float, float | None]) -> float | None:
    """Returns the rate that extends a grid at the end where the best one lies; None when that is inside, or rounds to it.

    A diverged rate counts as worse than any other.

    Example:
        >>> next_rate({0.001: 3.2, 0.002: 3.1, 0.004: 3.0}), next_rate({0.001: 3.2, 0.002: 3.1, 0.004: None})
        (0.008, None)
    """
    rates, best = sorted(losses), best_rate(losses)
    if best is None or len(rates) < 2 or best not in (rates[0], rates[-1]):
        return None
    step = rates[-1] / rates[-2] if best == rates[-1] else rates[0] / rates[1]
    wider = float(f"{best * step:.3g}")
    return None if wider in losses else wider


def trial_losses(plan: StudyPlan, trials: Iterable[RunRecord]) -> dict[str, dict[float, float | None]]:
    """The validation losses of the trials by arm and learning rate; None for one that diverged.

    Raises:
        StudyError: a trial has neither finished nor diverged.
    """
    losses: dict[str, dict[float, float | None]] = {}
    for record in trials:
        if record.status not in DONE:
            raise StudyError(
                f"{record.key}: {record.message}: every trial must have run before learning rates are chosen; run the study "
                "again"
            )
        arm = plan.arm(record.key.arm)
        losses.setdefault(arm.tuned_as, {})[arm.train_config(record.key.seed).optimizer.lr] = record.loss
    return losses
