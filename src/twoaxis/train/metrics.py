"""The metrics of a run: one line of JSON per step, appended as the run goes."""

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from twoaxis.core.atomic import replacing
from twoaxis.core.errors import CheckpointError
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
