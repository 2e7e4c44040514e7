"""The folder of a study: its design and plan, and one run folder per arm and replicate."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from twoaxis.core.errors import CheckpointError, DataError, StudyError
from twoaxis.core.files import locked_folder, remove_drafts, replacing
from twoaxis.core.text import json_value
from twoaxis.study.design import StudyConfig
from twoaxis.study.planning.equal_cost import tokens_per_step
from twoaxis.study.planning.study_plan import PlannedArm, StudyPlan
from twoaxis.study.running.baselines import Baselines
from twoaxis.study.timing import Timing
from twoaxis.train.metrics import Result, read_metrics
from twoaxis.train.recipe import TrainConfig
from twoaxis.train.run_folder import RunFolder, first_difference, json_bytes

RunStatus = Literal["finished", "diverged", "failed", "partial", "not started"]


class RunKey(NamedTuple):
    """One run of a study: an arm and a seed."""

    arm: str
    seed: int

    def __str__(self) -> str:
        return f"{self.arm} seed {self.seed}"


@dataclass(frozen=True)
class RunRecord:
    """The content of one run folder.

    Attributes:
        key: arm and seed.
        status: `finished`; `diverged`; `failed` (its process ended otherwise); `partial` (can be resumed); `not started`.
        message: the outcome, in one line.
        result: the result, when finished or diverged.
        curve: validation losses as (tokens read, nats per token).
        parameters: checksum of every initial value by name.
        recipe: as recorded by the run.
        data: corpus and tokenizer as recorded by the run.
        environment: as recorded by the run.
        reused_from: path of the equal run of another study, below the folder of studies; "" for a run of this study.
    """

    key: RunKey
    status: RunStatus
    message: str
    result: Result | None
    curve: tuple[tuple[int, float], ...]
    parameters: dict[str, str]
    recipe: dict[str, Any]
    data: dict[str, Any]
    environment: dict[str, Any]
    reused_from: str = ""

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

    def run(self, key: RunKey) -> RunFolder:
        """The folder of one run."""
        return RunFolder(self.path / "runs" / key.arm / f"seed-{key.seed}")

    def recipe(self, key: RunKey) -> Path:
        """The file with the recipe of one run."""
        return self.path / "runs" / key.arm / f"seed-{key.seed}.recipe.json"

    def log(self, key: RunKey) -> Path:
        """The file with the standard error of one run."""
        return self.path / "runs" / key.arm / f"seed-{key.seed}.log"

    def failure(self, key: RunKey) -> Path:
        """The file that records a failure; removed when the run starts again."""
        return self.path / "runs" / key.arm / f"seed-{key.seed}.failure.json"

    @property
    def study(self) -> StudyConfig:
        """The design.

        Raises:
            StudyError: the folder holds no study.
        """
        return self._read(self.path / "study.json", "the design of a study", StudyConfig.from_data)

    @property
    def plan(self) -> StudyPlan:
        """The plan that was made before the first run.

        Raises:
            StudyError: there is none.
        """
        return self._read(self.path / "plan.json", "the plan of a study", StudyPlan.from_data)

    @property
    def has_plan(self) -> bool:
        """Whether the study has been planned."""
        return (self.path / "plan.json").exists()

    @property
    def learning_rates(self) -> dict[str, float]:
        """The tuned learning rate of each arm; empty without trials or before they have run."""
        return self._read_if_exists(self.path / "tuned.json", "learning rates by arm", _learning_rates) or {}

    @property
    def timing_before(self) -> Timing | None:
        """Seconds of steps measured before runs: on the machine to which the study has moved, else those of the plan.

        Raises:
            StudyError: the file is damaged.
        """
        path = self.path / "timing_before.json"
        moved = self._read_if_exists(path, "the seconds of steps on the machine of the last run", Timing.from_data)
        return moved or self.plan.timing

    def keep_timing_before(self, timing: Timing) -> None:
        """Writes the first timing on another machine than that of the plan."""
        write_json(self.path / "timing_before.json", timing.to_data())

    @property
    def timing_after(self) -> Timing | None:
        """Seconds of steps measured after the last run; None before that.

        Raises:
            StudyError: the file is damaged.
        """
        path = self.path / "timing_after.json"
        return self._read_if_exists(path, "the seconds of steps after the last run", Timing.from_data)

    def keep_timing_after(self, timing: Timing) -> None:
        """Writes the timing after the last run."""
        write_json(self.path / "timing_after.json", timing.to_data())

    @property
    def baselines(self) -> Baselines | None:
        """Losses of count models; None when not measured yet, or unreadable."""
        try:
            return self._read(self.path / "baselines.json", "losses of count models", Baselines.from_data)
        except StudyError:
            return None

    def keep_baselines(self, baselines: Baselines) -> None:
        """Writes the losses of the count models."""
        write_json(self.path / "baselines.json", baselines.to_data())

    def decide(self, study: StudyConfig) -> None:
        """Writes the design, or compares it with the one in the folder.

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

    @property
    def command(self) -> str:
        """The recorded command that made the study, or else one that repeats it from its design."""
        path = self.path / "command.txt"
        if not path.exists():
            return f"twoaxis study {self.path / 'study.json'} --out NEW"
        return path.read_bytes().decode(errors="backslashreplace").strip()

    def keep_command(self, command: str) -> None:
        """Writes the command."""
        with replacing(self.path / "command.txt") as file:
            file.write(os.fsencode(command) + b"\n")

    def audit(self, key: RunKey) -> dict[str, Any] | None:
        """The result of `twoaxis audit` on a run; None without one."""
        return self._read_if_exists(self.run(key).path / "audit.json", "the audit of a run", _table)

    def keep_plan(self, plan: StudyPlan) -> None:
        """Writes the plan with its timing, which later calls reuse."""
        write_json(self.path / "plan.json", plan.to_data())

    def keep_learning_rates(self, chosen: dict[str, float]) -> None:
        """Writes the tuned learning rates, which later calls reuse."""
        write_json(self.path / "tuned.json", chosen)

    def recipe_of(self, arm: PlannedArm, seed: int) -> TrainConfig:
        """The recipe of one run, with the tuned learning rate of its arm if there is one."""
        return arm.train_config(seed, self.learning_rates.get(arm.tuned_as) if arm.role != "trial" else None)

    def check(self, keys: list[RunKey]) -> None:
        """Compares the recipes of started runs with the plan.

        Raises:
            StudyError: a folder holds another run.
        """
        plan = self.plan
        for key in keys:
            try:
                self.run(key).check(self.recipe_of(plan.arm(key.arm), key.seed))
            except CheckpointError as error:
                raise StudyError(f"{key}: {error}") from None

    def _read_if_exists(self, path: Path, content: str, parse: Callable[[Any], Any]) -> Any:
        return self._read(path, content, parse) if path.exists() else None

    def _read(self, path: Path, content: str, parse: Callable[[Any], Any]) -> Any:
        try:
            return parse(json_value(path.read_bytes()))
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise StudyError(
                f"{path}: cannot be read ({reason}); must be {content}; name a folder that `twoaxis study` has made"
            ) from None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Locks the study against other processes; the lock of a killed process is released.

        Raises:
            StudyError: another process runs it, the folder cannot be made, or it holds something else.
        """
        with ExitStack() as stack:
            try:
                stack.enter_context(locked_folder(self.path, "study", "study.json"))
            except (CheckpointError, DataError) as error:
                raise StudyError(str(error)) from None
            for arm in self.path.glob("runs/*"):
                remove_drafts(arm)
            yield

    def record(self, key: RunKey) -> RunRecord:
        """Reads the record of one run.

        Raises:
            StudyError: a file of the run is damaged.
        """
        run = self.run(key)
        try:
            result = run.result
            status, message = self._status(key, result)
            files = {name: run.read(name) for name in ("initial_parameters", "config", "data", "env") if _has(run, name)}
            losses = [(record.step, record.validation_loss) for record in read_metrics(run.metrics)]
            config = run.config if losses else None
            reused_from = run.read("reused")["from"] if _has(run, "reused") else ""
        except CheckpointError as error:
            raise StudyError(f"{key}: {error}") from None
        return RunRecord(
            key,
            status,
            message,
            result,
            tuple((step * tokens_per_step(config), loss) for step, loss in losses if config is not None and loss is not None),
            files.get("initial_parameters", {}),
            files.get("config", {}) if config is None else config.to_data(),
            files.get("data", {}),
            files.get("env", {}),
            reused_from,
        )

    def _status(self, key: RunKey, result: Result | None) -> tuple[RunStatus, str]:
        if result is not None:
            return ("finished" if result.status == "finished" else "diverged"), result.message
        failure = self._read_if_exists(self.failure(key), "how a run has failed", _table)
        if failure is not None:
            return "failed", str(failure.get("message"))
        if self.run(key).path.exists():
            steps = len(read_metrics(self.run(key).metrics))
            return "partial", f"stopped after step {steps}; run the study again to continue"
        return "not started", "not started"


def _table(data: Any) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise ValueError("is no table")
    return data


def _learning_rates(data: Any) -> dict[str, float]:
    if odd := {arm: rate for arm, rate in _table(data).items() if not isinstance(rate, float)}:
        raise ValueError(f"is no number: {odd}")
    return data


def run_keys(plan: StudyPlan) -> list[RunKey]:
    """All runs in order: trials first, since they set the learning rates of the others.

    Then one replicate after another, so that an interrupted study has complete pairs. The order of the arms rotates between
    replicates, so that drift of the machine affects all arms alike.
    """
    order = [RunKey(arm.name, seed) for arm in plan.of_role("trial") for seed in arm.seeds]
    arms = [arm.name for arm in plan.arms if arm.role != "trial"]
    for number, seed in enumerate(plan.control.seeds):
        turn = number % len(arms)
        order += [RunKey(arm, seed) for arm in arms[turn:] + arms[:turn]]
    return order


def write_json(path: Path, data: Any) -> None:
    """Writes a JSON file, whole or not at all."""
    with replacing(path) as file:
        file.write(json_bytes(data))


def _has(run: RunFolder, name: str) -> bool:
    return (run.path / f"{name}.json").exists()
