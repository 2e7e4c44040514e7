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
        validation_loss: after the step in nats per token, when it was measured.
        bpb: the validation loss in bits per byte.
        validation_accuracy: part of the answers that were the most likely token, for a corpus that asks for answers.
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
        """The record as JSON; numbers that are not finite, which JSON cannot hold, become null."""
        data = {key: value for key, value in self._asdict().items() if value is not None}
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in data.items()}
        return json.dumps(finite, allow_nan=False)

    @classmethod
    def from_line(cls, line: str | bytes) -> "StepRecord":
        """Reads what `to_line` wrote; null becomes NaN.

        Raises:
            ValueError: the line is not such a record.
        """
        data: Any = json_value(line)
        if not isinstance(data, dict) or not {"step", "loss", "tokens", "seconds"} <= data.keys() <= set(cls._fields):
            raise ValueError("not a record of a step")
        numbers: dict[str, Any] = {key: math.nan if value is None else value for key, value in data.items()}
        return cls(**numbers)


def read_metrics(path: Path) -> list[StepRecord]:
    """Reads the records of a run, finished or not; a torn last line is left out."""
    return _intact(path.read_bytes())[0] if path.exists() else []


class MetricsLog:
    """Appends records, beginning after the given step: what later steps had written is cut off.

    Args:
        path: the file.
        step: the step of the checkpoint that the run continues from.

    Raises:
        CheckpointError: the file lacks steps that the checkpoint has behind it.
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
                # Shared with the run of another study, which has to stay as it is.
                content = path.read_bytes()
                with replacing(path) as own:
                    own.write(content)
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
        """Makes all records durable, so that a checkpoint is never ahead of them."""
        with _one_line_error(self.path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file."""
        # What a full disk has refused was said when it was appended, and is refused here again.
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
    """The records up to the first line that is torn, damaged or out of order, and where each ends in bytes."""
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
