"""The result of a training run."""

import math
import statistics
from collections.abc import Sequence
from typing import Any, Literal

from twoaxis.core.config import Config
from twoaxis.train.metrics import StepRecord

WARMUP_STEPS = 10
"""First steps that are left out of the measured speed, at most a tenth of the run."""

Status = Literal["finished", "diverged", "interrupted"]


class Result(Config):
    """The outcome of a run; written to `result.json` when the run has finished or diverged.

    Attributes:
        status: `finished`, `diverged` (a loss or gradient that is not finite) or `interrupted` (call again to go on).
        message: a summary, in one line.
        steps: optimizer steps taken.
        tokens: tokens read, a count.
        target_tokens: tokens that carried a loss, a count.
        parameters: parameters of the model, a count.
        validation_loss: after the last step, in nats per token; None without a validation or a finite loss.
        best_validation_loss: the smallest of the run, in nats per token.
        bpb: the last validation loss in bits per byte.
        validation_accuracy: after the last step, the fraction of answers that were the most likely token; None for a corpus
            without answers.
        forward_flops_per_token: of one forward pass, by the declared costs.
        training_flops_per_token: three forward passes, since the backward pass computes twice as much.
        train_seconds: spent in steps, without validation and checkpoints.
        tokens_per_second: median over the steps after the first ones.
        step_seconds: median over the same steps.
        peak_memory_bytes: largest resident memory of the process.
        peak_device_memory_bytes: largest memory allocated on the GPU, 0 without one.
    """

    status: Status
    message: str
    steps: int
    tokens: int
    target_tokens: int
    parameters: int
    validation_loss: float | None
    best_validation_loss: float | None
    bpb: float | None
    validation_accuracy: float | None = None
    forward_flops_per_token: float
    training_flops_per_token: float
    train_seconds: float
    tokens_per_second: float | None
    step_seconds: float | None
    peak_memory_bytes: int
    peak_device_memory_bytes: int


def summarise(records: Sequence[StepRecord], tokens_per_step: int) -> dict[str, Any]:
    """The fields of a `Result` that follow from the metrics."""
    validated = [record for record in records if record.validation_loss is not None]
    losses = [loss for record in validated if (loss := record.validation_loss) is not None and math.isfinite(loss)]
    seconds = [record.seconds for record in records]
    timed = seconds[min(WARMUP_STEPS, math.ceil(len(seconds) / 10)) :] or seconds
    typical = statistics.median(timed) if timed else None
    return {
        "steps": len(records),
        "tokens": len(records) * tokens_per_step,
        "target_tokens": sum(record.tokens for record in records),
        "validation_loss": _finite(validated[-1].validation_loss) if validated else None,
        "best_validation_loss": min(losses, default=None),
        "bpb": _finite(validated[-1].bpb) if validated else None,
        "validation_accuracy": validated[-1].validation_accuracy if validated else None,
        "train_seconds": math.fsum(seconds),
        "tokens_per_second": tokens_per_step / typical if typical else None,
        "step_seconds": typical,
    }


def _finite(number: float | None) -> float | None:
    # JSON has no other numbers; the message of a diverged run has them.
    return number if number is not None and math.isfinite(number) else None
