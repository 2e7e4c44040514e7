"""The metrics of a run, one line of JSON per step, and the result it ends with."""

import json
import math
import os
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

from twoaxis.core.config import Config
from twoaxis.core.errors import CheckpointError
from twoaxis.core.files import replacing
from twoaxis.core.text import json_value


class StepRecord(NamedTuple):
    """One line of `metrics.jsonl`.

    Attributes:
        step: steps taken, this one included.
        loss: training loss before the update in nats per token.
        grad_norm: norm of the gradient before clipping.
        lr: learning rate of the step, before any factor of a group.
        tokens: tokens that carried a loss.
        seconds: spent in the step, without validation and checkpoints.
        validation_loss: after the step in nats per token, when measured.
        bpb: the validation loss in bits per byte.
        validation_accuracy: fraction of answers that were the most likely token, for a corpus with answers.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    seconds: float
    validation_loss: float | None = None
    bpb: float | None = None
    validation_accuracy: float | None = None

    def to_line(self) -> str:
        """The record as JSON; numbers that are not finite become null."""
        data = {key: value for key, value in self._asdict().items() if value is not None}
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in data.items()}
        return json.dumps(finite, allow_nan=False)

    @classmethod
    def from_line(cls, line: str | bytes) -> "StepRecord":
        """Parses a line of `to_line`; null becomes NaN.

        Raises:
            ValueError: the line is no record.
        """
        data: Any = json_value(line)
        if not isinstance(data, dict) or not {"step", "loss", "tokens", "seconds"} <= data.keys() <= set(cls._fields):
            raise ValueError("not a record of a step")
        numbers: dict[str, Any] = {key: math.nan if value is None else value for key, value in data.items()}
        return cls(**numbers)


def read_metrics(path: Path) -> list[StepRecord]:
    """Reads the records of a run, without an incomplete last line."""
    return _intact(path.read_bytes())[0] if path.exists() else []


class UnwrittenMetrics:
    """The records of a rank that writes no file: those of the steps that it takes itself."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    def append(self, record: StepRecord) -> None:
        """Keeps one record."""
        self.records.append(record)

    def sync(self) -> None:
        """Has nothing to flush."""

    def close(self) -> None:
        """Has nothing to close."""


class MetricsLog:
    """Appends records after the `step` of a checkpoint; records of later steps are truncated.

    Raises:
        CheckpointError: the file lacks steps up to the checkpoint.
    """

    def __init__(self, path: Path, step: int) -> None:
        records, ends = _intact(path.read_bytes() if path.exists() else b"")
        if len(records) < step:
            raise CheckpointError(
                f"{path}: ends at step {len(records)}; must reach step {step} of the checkpoint; "
                "restore the file, or start in a new run folder"
            )
        self.path, self.records = path, records[:step]
        with _one_line_error(path):
            if path.exists() and path.stat().st_nlink > 1:
                # A hard link to the run of another study, which must not change.
                content = path.read_bytes()
                with replacing(path) as copy:
                    copy.write(content)
            self._file = open(path, "ab")  # noqa: SIM115, closed by `close`
            self._file.truncate(ends[step])

    def append(self, record: StepRecord) -> None:
        """Writes one record.

        Raises:
            CheckpointError: the disk is full, or the file cannot be written.
        """
        with _one_line_error(self.path):
            self._file.write(record.to_line().encode() + b"\n")
            self._file.flush()
        self.records.append(record)

    def sync(self) -> None:
        """Flushes all records to disk, so that a checkpoint is never ahead of them."""
        with _one_line_error(self.path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file."""
        # A full disk fails here again; the error was raised by `append`.
        with suppress(OSError):
            self._file.close()


@contextmanager
def _one_line_error(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be written ({error.strerror or error}); the checkpoints are intact; "
            "free space there and run again to resume"
        ) from None


def _intact(content: bytes) -> tuple[list[StepRecord], list[int]]:
    """The records before the first line that is incomplete, damaged or out of order, and their end offsets in bytes."""
    records: list[StepRecord] = []
    ends = [0]
    for line in content.splitlines(keepends=True):
        try:
            record = StepRecord.from_line(line)
        except (ValueError, TypeError):
            break
        if not line.endswith(b"\n") or record.step != len(records) + 1:
            break
        records.append(record)
        ends.append(ends[-1] + len(line))
    return records, ends


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
        validation_loss: the last one, which a finished run has after its last step, in nats per token; None without a
            validation or a finite loss.
        best_validation_loss: the smallest of the run, in nats per token.
        bpb: the last validation loss in bits per byte.
        validation_accuracy: with that loss, the fraction of answers that were the most likely token; None for a corpus
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
