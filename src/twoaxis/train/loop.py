"""The training loop: from the first step, or the newest checkpoint, to the result."""

import math
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from twoaxis.core.cost import Shape
from twoaxis.core.interrupt import StopRequest, stop_on_signals
from twoaxis.model.cost import decoder_cost
from twoaxis.train.environment import PeakMemory, reset_peak
from twoaxis.train.metrics import Result, Status, StepRecord, summarise
from twoaxis.train.parallel.ranks import Ranks, joined
from twoaxis.train.progress import Progress
from twoaxis.train.recipe import TrainConfig
from twoaxis.train.run_folder import RunFolder, is_longer, lengthen
from twoaxis.train.trackers import AnyTracker, Tracking, build_trackers
from twoaxis.train.trainer import Trainer


def train(
    config: TrainConfig,
    run_dir: Path | str,
    progress: Progress | None = None,
    should_stop: Callable[[], bool] | None = None,
    trackers: Iterable[AnyTracker] = (),
) -> Result:
    """Trains to the end of the recipe, resuming the run in the folder if there is one.

    A run that was stopped or killed resumes to the same losses and weights, bit for bit. The result of a run that has finished
    or diverged is read instead. A recipe with more `steps` and nothing else changed continues the run if the schedule gives the
    steps taken the same learning rates in the longer run.

    Args:
        config: the recipe.
        run_dir: the folder of the run, created if it does not exist.
        progress: progress callbacks, optional.
        should_stop: called after every step; true stops the run after a checkpoint, as SIGINT and SIGTERM do.
        trackers: receive every step: kinds of the table `TRACKERS`, or objects with the methods of `Tracker`. A run may be
            resumed with others.

    Returns:
        The result; its status says whether the run finished, diverged or was interrupted.

    Raises:
        ConfigError: a recipe that cannot be run here, or a tracker that cannot be started.
        DataError: a corpus or tokenizer that cannot be used.
        CheckpointError: a folder of another run, no intact checkpoint among several, a full disk, or more steps than its
            schedule allows.
    """
    progress = progress or Progress()
    try:
        with joined(config.parallel, config.device) as ranks, ranks.watched():
            # Only the first rank writes the folder and shows progress.
            shown = progress if ranks.is_first else Progress()
            result = _train(config, RunFolder(run_dir), shown, should_stop, trackers if ranks.is_first else (), ranks)
            # The others end when the first one has closed its trackers, since a launcher ends all after the first failure.
            ranks.gather(None)
            return result
    finally:
        progress.stop()


def _train(
    config: TrainConfig,
    folder: RunFolder,
    progress: Progress,
    should_stop: Callable[[], bool] | None,
    trackers: Iterable[AnyTracker],
    ranks: Ranks,
) -> Result:
    with ExitStack() as stack:
        ranks.first(lambda: stack.enter_context(folder.locked()))
        finished = ranks.first(lambda: _finished(folder, config))
        if finished is not None:
            progress.note(f"{folder.path}: {finished['message']}")
            return Result.from_data(finished)
        # Before the data, which may take long to prepare, so that a missing package is an error at once.
        built = ranks.each(lambda: build_trackers(trackers))
        trainer = Trainer(config, folder, progress, ranks)
        stack.callback(trainer.abandon_saving)
        metrics = stack.enter_context(closing(trainer.metrics))
        tracking = Tracking(built, folder, config, metrics.records, trainer.tokens_per_step, progress)
        tracking = stack.enter_context(tracking)
        # The first write that a shorter run would miss, so after all that may fail.
        ranks.first(lambda: lengthen(folder, config, progress))
        result = _run(trainer, tracking, should_stop)
        tracking.finish(result)
        return result


def _finished(folder: RunFolder, config: TrainConfig) -> dict[str, Any] | None:
    """The result of a run that has ended, unless the recipe continues it."""
    if is_longer(folder, config):
        return None
    folder.check(config)
    return None if folder.result is None else folder.result.to_data()


def _run(trainer: Trainer, tracking: Tracking, should_stop: Callable[[], bool] | None) -> Result:
    config, progress = trainer.config, trainer.progress
    # Preparing the data may take more memory than training.
    reset_peak()
    progress.start(trainer.step, config.steps, trainer.tokens_per_step)
    with stop_on_signals(repeats=trainer.ranks.count > 1) as request:
        while trainer.step < config.steps:
            record = _step(trainer)
            tracking.log(record)
            problem = _divergence(record)
            if problem:
                trainer.finish_saving()
                return _finish(trainer, "diverged", f"{problem}; the last checkpoint is of step {trainer.saved_step}")
            stopped_by = _stopped_by(trainer.ranks, request, should_stop)
            if trainer.step == config.steps or trainer.step % config.checkpoint_every == 0 or stopped_by:
                trainer.save()
            if stopped_by or trainer.step == config.steps:
                trainer.finish_saving()
            if stopped_by and trainer.step < config.steps:
                done = f"{trainer.step} of {config.steps} steps"
                return _finish(trainer, "interrupted", f"stopped by {stopped_by}, {done} are saved; run again to go on")
    return _finish(trainer, "finished", f"finished {config.steps} steps")


def _stopped_by(ranks: Ranks, request: StopRequest, should_stop: Callable[[], bool] | None) -> str:
    """What stops the run after this step, the same on all ranks; "" when nothing does."""
    asked = should_stop is not None and should_stop()
    number = ranks.largest(2 * request.number + asked)
    return signal.Signals(number // 2).name if number > 1 else "should_stop" if number else ""


def _step(trainer: Trainer) -> StepRecord:
    """Takes one step, validates if it is due, and writes the record."""
    begin = time.perf_counter()
    multiplier = trainer.config.schedule.multiplier(trainer.step, trainer.config.steps)
    outcome = trainer.take_step(multiplier)
    seconds = time.perf_counter() - begin
    lr = trainer.config.optimizer.lr * multiplier
    record = StepRecord(trainer.step, outcome.loss, outcome.grad_norm, lr, outcome.tokens, seconds)
    last = trainer.step == trainer.config.steps
    if not _divergence(record) and (last or trainer.step % trainer.config.validate_every == 0):
        validation = trainer.validate()
        record = record._replace(validation_loss=validation.loss, bpb=validation.bpb, validation_accuracy=validation.accuracy)
    trainer.metrics.append(record)
    trainer.progress.step(record)
    return record


def _divergence(record: StepRecord) -> str:
    """The error message of measurements that are not finite; "" when all are."""
    measured = {"loss": record.loss, "gradient norm": record.grad_norm, "validation loss": record.validation_loss}
    not_finite = [f"{name} {value}" for name, value in measured.items() if value is not None and not math.isfinite(value)]
    if not not_finite:
        return ""
    return f"diverged at step {record.step}: {', '.join(not_finite)}: must be finite; lower optimizer.lr or warm up for longer"


def _finish(trainer: Trainer, status: Status, message: str) -> Result:
    """The result, which the first rank writes and all return."""
    ranks = trainer.ranks
    peak = PeakMemory(*map(ranks.largest, trainer.peak))
    result = Result.from_data(ranks.first(lambda: _result(trainer, status, message, peak).to_data()))
    trainer.progress.note(f"{trainer.folder.path}: {message}")
    return result


def _result(trainer: Trainer, status: Status, message: str, peak: PeakMemory) -> Result:
    cost = decoder_cost(trainer.model.config, Shape(trainer.config.batch_size, trainer.config.data.seq_len))
    forward = cost.flops / trainer.tokens_per_step
    result = Result(
        status=status,
        message=message,
        parameters=cost.params,
        forward_flops_per_token=forward,
        training_flops_per_token=3 * forward,
        **peak._asdict(),
        **summarise(trainer.metrics.records, trainer.tokens_per_step),
    )
    if status != "interrupted":
        trainer.metrics.sync()
        trainer.folder.write("result", result.to_data())
    return result
