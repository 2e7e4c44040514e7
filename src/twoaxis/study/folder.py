"""The folder of a study: the design as it was decided, and one run folder per arm and replicate."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from twoaxis.core.errors import CheckpointError, DataError, StudyError
from twoaxis.data.atomic import replacing
from twoaxis.study.design import StudyConfig
from twoaxis.train.metrics import read_metrics
from twoaxis.train.recipe import TrainConfig
from twoaxis.train.result import Result
from twoaxis.train.run_folder import RunFolder, first_difference

RunStatus = Literal["finished", "diverged", "failed", "partial", "not started"]


class Place(NamedTuple):
    """One run of a study: an arm and a seed."""

    arm: str
    seed: int

    def __str__(self) -> str:
        return f"{self.arm} seed {self.seed}"


@dataclass(frozen=True)
class RunRecord:
    """What the folder of one run holds.

    Attributes:
        place: arm and seed.
        status: `finished`; `diverged`; `failed` (its process ended otherwise); `partial` (can be resumed); `not started`.
        message: what happened, in one line.
        result: the result, when finished or diverged.
        curve: validation losses as (tokens read, nats per token).
        parameters: checksum of every initial value by name.
        recipe: as recorded by the run.
        data: corpus and tokenizer as recorded by the run.
        environment: as recorded by the run.
    """

    place: Place
    status: RunStatus
    message: str
    result: Result | None
    curve: tuple[tuple[int, float], ...]
    parameters: dict[str, str]
    recipe: dict[str, Any]
    data: dict[str, Any]
    environment: dict[str, Any]

    @property
    def loss(self) -> float | None:
        """The metric of the study, in nats per token; None unless the run finished with one."""
        return self.result.validation_loss if self.result is not None and self.status == "finished" else None


class StudyFolder:
    """The files of one study.

    Attributes:
        path: the folder.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    def run(self, place: Place) -> RunFolder:
        """The folder of one run."""
        return RunFolder(self.path / "runs" / place.arm / f"seed-{place.seed}")

    def recipe(self, place: Place) -> Path:
        """The file with the recipe of one run, beside its folder."""
        return self.path / "runs" / place.arm / f"seed-{place.seed}.recipe.json"

    def log(self, place: Place) -> Path:
        """The file with what the processes of one run wrote to standard error."""
        return self.path / "runs" / place.arm / f"seed-{place.seed}.log"

    def failure(self, place: Place) -> Path:
        """The file that says how the process of one run ended badly; there only while that is the last word."""
        return self.path / "runs" / place.arm / f"seed-{place.seed}.failure.json"

    @property
    def study(self) -> StudyConfig:
        """The design.

        Raises:
            StudyError: the folder holds no study.
        """
        path = self.path / "study.json"
        try:
            return StudyConfig.from_data(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise StudyError(
                f"{path}: cannot be read ({reason}); must be the design of a study; name a folder that `twoaxis study` has made"
            ) from None

    def decide(self, study: StudyConfig) -> None:
        """Writes the design down, or compares it with the one that was.

        Raises:
            StudyError: they differ; the message names the first key that does.
        """
        if (self.path / "study.json").exists():
            difference = first_difference(self.study.to_data(), study.to_data())
            if difference:
                key, there, here = difference
                raise StudyError(
                    f"study folder {self.path}: {key}={there!r} there, {here!r} in this study: must be equal, since a study is "
                    "decided before its first run; restore the key, or run in a new folder"
                )
        else:
            write_json(self.path / "study.json", study.to_data())
        for place in places(study):
            try:
                self.run(place).check(study.recipe(*place))
            except CheckpointError as error:
                raise StudyError(f"{place}: {error}") from None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other processes from running the same study; a killed process lets go by itself.

        Raises:
            StudyError: another process runs it, or the folder cannot be made.
        """
        lock = RunFolder(self.path).locked()
        try:
            lock.__enter__()
        except CheckpointError:
            raise StudyError(f"study folder {self.path}: another process runs it; wait for it or stop it") from None
        except DataError as error:
            raise StudyError(str(error).replace("run folder", "study folder")) from None
        try:
            yield
        finally:
            lock.__exit__(None, None, None)

    def record(self, place: Place) -> RunRecord:
        """Reads what one run has come to.

        Raises:
            StudyError: a file of the run is damaged.
        """
        run = self.run(place)
        try:
            result = run.result
            status, message = self._status(place, result)
            files = {name: run.read(name) for name in ("initial_parameters", "config", "data", "env") if _has(run, name)}
            losses = [(record.step, record.validation_loss) for record in read_metrics(run.metrics)]
            config = TrainConfig.from_data(files["config"]) if losses else None
        except CheckpointError as error:
            raise StudyError(f"{place}: {error}") from None
        return RunRecord(
            place,
            status,
            message,
            result,
            tuple((step * tokens_per_step(config), loss) for step, loss in losses if config is not None and loss is not None),
            files.get("initial_parameters", {}),
            files.get("config", {}),
            files.get("data", {}),
            files.get("env", {}),
        )

    def _status(self, place: Place, result: Result | None) -> tuple[RunStatus, str]:
        if result is not None:
            return ("finished" if result.status == "finished" else "diverged"), result.message
        if self.failure(place).exists():
            return "failed", json.loads(self.failure(place).read_text(encoding="utf-8"))["message"]
        if self.run(place).path.exists():
            steps = len(read_metrics(self.run(place).metrics))
            return "partial", f"stopped after step {steps}; run the study again to go on"
        return "not started", "not started"


def places(study: StudyConfig) -> list[Place]:
    """All runs in the order they are made.

    Replicates come one after another, so that an interrupted study has complete pairs, and the order of the arms
    rotates from replicate to replicate, so that a machine that becomes slower or faster meets every arm alike.
    """
    arms, order = list(study.arms), []
    for number, seed in enumerate(study.replicates):
        turn = number % len(arms)
        order += [Place(arm, seed) for arm in arms[turn:] + arms[:turn]]
    return order


def write_json(path: Path, data: Any) -> None:
    """Writes a file of JSON, whole or not at all."""
    with replacing(path) as file:
        file.write(json.dumps(data, indent=1, allow_nan=False).encode() + b"\n")


def tokens_per_step(recipe: TrainConfig) -> int:
    """Tokens that one step of a recipe reads."""
    return recipe.batch_size * recipe.data.seq_len


def _has(run: RunFolder, name: str) -> bool:
    return (run.path / f"{name}.json").exists()
