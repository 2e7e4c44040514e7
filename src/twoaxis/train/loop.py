"""The training loop: from the first step, or the newest checkpoint, to the result."""

import math
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path

from twoaxis.core.cost import Shape
from twoaxis.core.interrupt import stop_on_signals
from twoaxis.model.cost import decoder_cost
from twoaxis.train.environment import peak_bytes, peak_device_bytes, reset_peak
from twoaxis.train.metrics import Result, Status, StepRecord, summarise
from twoaxis.train.progress import Progress
from twoaxis.train.recipe import TrainConfig
from twoaxis.train.run_folder import RunFolder, is_longer
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
    folder = RunFolder(run_dir)
    try:
        with folder.locked():
            if not is_longer(folder, config):
                folder.check(config)
                finished = folder.result
                if finished is not None:
                    progress.note(f"{folder.path}: {finished.message}")
                    return finished
            # Before the data, which may take long to prepare, so that a missing package is an error at once.
            built = build_trackers(trackers)
            trainer = Trainer(config, folder, progress)
            metrics = trainer.metrics
            with closing(metrics), Tracking(built, folder, metrics.records, trainer.tokens_per_step, progress) as tracking:
                result = _run(trainer, tracking, should_stop)
                tracking.finish(result)
                return result
    finally:
        progress.stop()


def _run(trainer: Trainer, tracking: Tracking, should_stop: Callable[[], bool] | None) -> Result:
    config, progress = trainer.config, trainer.progress
    # Preparing the data may take more memory than training.
    reset_peak()
    progress.start(trainer.step, config.steps, trainer.tokens_per_step)
    with stop_on_signals() as request:
        while trainer.step < config.steps:
            record = _step(trainer)
            tracking.log(record)
            problem = _divergence(record)
            if problem:
                return _finish(trainer, "diverged", f"{problem}; the last checkpoint is of step {trainer.saved_step}")
            stopped_by = request.name or ("should_stop" if should_stop is not None and should_stop() else "")
            if trainer.step == config.steps or trainer.step % config.checkpoint_every == 0 or stopped_by:
                trainer.save()
            if stopped_by and trainer.step < config.steps:
                done = f"{trainer.step} of {config.steps} steps"
                return _finish(trainer, "interrupted", f"stopped by {stopped_by}, {done} are saved; run again to go on")
    return _finish(trainer, "finished", f"finished {config.steps} steps")


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
    wild = [f"{name} {value}" for name, value in measured.items() if value is not None and not math.isfinite(value)]
    if not wild:
        return ""
    return f"diverged at step {record.step}: {', '.join(wild)}: must be finite; lower optimizer.lr or warm up for longer"


def _finish(trainer: Trainer, status: Status, message: str) -> Result:
    config = trainer.config
    cost = decoder_cost(trainer.model.config, Shape(config.batch_size, config.data.seq_len))
    forward = cost.flops / trainer.tokens_per_step
    result = Result(
        status=status,
        message=message,
        parameters=cost.params,
        forward_flops_per_token=forward,
        training_flops_per_token=3 * forward,
        peak_memory_bytes=max(trainer.earlier_peak_bytes, peak_bytes()),
        peak_device_memory_bytes=peak_device_bytes(),
        **summarise(trainer.metrics.records, trainer.tokens_per_step),
    )
    if status != "interrupted":
        trainer.metrics.sync()
        trainer.folder.write("result", result.to_data())
    trainer.progress.note(f"{trainer.folder.path}: {message}")
    return result
