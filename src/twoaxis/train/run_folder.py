"""The folder of a run: configuration, environment, data, metrics, checkpoints, result; more steps for one that has begun."""

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

from twoaxis.core.errors import CheckpointError, ConfigError
from twoaxis.core.files import locked_folder, replacing, try_lock
from twoaxis.core.text import json_value, read_text
from twoaxis.data import PreparedData, Tokenizer, load_tokenizer
from twoaxis.train.checkpoint import checkpoint_paths, newest_step
from twoaxis.train.metrics import Result
from twoaxis.train.progress import Progress
from twoaxis.train.recipe import TrainConfig

NEEDED = {
    "data": ("corpus.fingerprint", "tokenizer.fingerprint"),
    "env": ("versions.twoaxis",),
    "reused": ("from",),
    "tracking": ("run_id",),
}
"""Required keys of JSON files without a schema, by dotted path."""

REMEDY = "name a folder that `twoaxis train` has made"

C = TypeVar("C")


class RunFolder:
    """The files of one run."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.metrics = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"

    @property
    def is_begun(self) -> bool:
        """Whether this is the folder of a run, with or without its checkpoints; folders of models have no `data.json`."""
        return self.checkpoints.is_dir() or all((self.path / f"{name}.json").is_file() for name in ("config", "data"))

    @property
    def config(self) -> TrainConfig:
        """The recipe of the run."""
        return self._parsed("config", TrainConfig.from_record)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the run."""
        return load_tokenizer(json.dumps(self.read("tokenizer")))

    @property
    def result(self) -> Result | None:
        """The result of a run that has finished or diverged."""
        return self._parsed("result", Result.from_data) if (self.path / "result.json").exists() else None

    def check(self, config: TrainConfig) -> None:
        """Compares the recipe with that of the folder, if it has one.

        Raises:
            CheckpointError: the first key that differs.
        """
        if not (self.path / "config.json").exists():
            return
        difference = other_recipe(self.config, config)
        if difference:
            key, there, here = difference
            raise CheckpointError(
                f"run folder {self.path}: {key}={there!r} there, {here!r} in this recipe: must be equal to resume; "
                "use the recipe of the folder, or start in a new folder"
            )

    def claim(self, config: TrainConfig, data: PreparedData) -> None:
        """Records recipe, corpus and tokenizer, or compares them with the recorded ones.

        A longer recipe is accepted here and recorded by `lengthen`.

        Raises:
            CheckpointError: one of them differs.
        """
        if not is_longer(self, config):
            self.check(config)
        now = data.to_data()
        if (self.path / "data.json").exists():
            before = self.read("data")
            for what in ("corpus", "tokenizer"):
                if before[what]["fingerprint"] != now[what]["fingerprint"]:
                    raise CheckpointError(
                        f"{what}: {_called(before[what])} in run folder {self.path}, {_called(now[what])} now: must be equal "
                        f"to resume; restore the {what}, or start in a new folder"
                    )
        self.write_once("config", config.to_data())
        self.write_once("tokenizer", json.loads(data.tokenizer.definition))
        self.write_once("data", now)

    def read(self, name: str) -> Any:
        """Reads `name.json`.

        Raises:
            CheckpointError: it is missing or damaged.
        """
        path = self.path / f"{name}.json"
        text = read_text(path, str(path), REMEDY, CheckpointError)
        try:
            data = json_value(text)
            for keys in ("", *NEEDED.get(name, ())):
                _check_has(data, keys)
        except ValueError as error:
            raise CheckpointError(f"{path}: cannot be read ({error}); {REMEDY}") from None
        return data

    def _parsed(self, name: str, parse: Callable[[Any], C]) -> C:
        try:
            return parse(self.read(name))
        except ConfigError as error:
            raise CheckpointError(f"{self.path / name}.json: cannot be read ({error}); {REMEDY}") from None

    def write(self, name: str, data: Any) -> None:
        """Writes `name.json` atomically."""
        with replacing(self.path / f"{name}.json") as file:
            file.write(json_bytes(data))

    def write_once(self, name: str, data: Any) -> None:
        """Writes `name.json` unless it exists."""
        if not (self.path / f"{name}.json").exists():
            self.write(name, data)

    @property
    def is_locked(self) -> bool:
        """Whether another process trains in the folder."""
        path = self.path / ".lock"
        if not path.exists():
            return False
        with open(path, "ab") as file:
            return try_lock(file.fileno()) == "taken"

    def locked(self) -> AbstractContextManager[None]:
        """Locks the folder against other processes; see `locked_folder`."""
        return locked_folder(self.path, "run", "config.json")


def json_bytes(data: Any) -> bytes:
    """The content of a JSON file; a number that is not finite raises a ValueError."""
    return json.dumps(data, indent=1, allow_nan=False).encode() + b"\n"


def first_difference(there: Any, here: Any, path: str = "") -> tuple[str, Any, Any] | None:
    """The first key whose values differ, as a dotted path, with both values.

    Example:
        >>> first_difference({"model": {"d_model": 64}}, {"model": {"d_model": 32}})
        ('model.d_model', 64, 32)
    """
    if isinstance(there, Mapping) and isinstance(here, Mapping):
        for key in [*here, *(key for key in there if key not in here)]:
            inner = f"{path}.{key}" if path else str(key)
            if key not in there or key not in here:
                return inner, there.get(key, "nothing"), here.get(key, "nothing")
            if found := first_difference(there[key], here[key], inner):
                return found
        return None
    if isinstance(there, list) and isinstance(here, list) and len(there) == len(here):
        pairs = enumerate(zip(there, here, strict=True))
        return next((found for i, pair in pairs if (found := first_difference(*pair, f"{path}.{i}"))), None)
    return None if there == here else (path, there, here)


def other_recipe(there: TrainConfig, here: TrainConfig) -> tuple[str, Any, Any] | None:
    """The first difference of two recipes, as `first_difference`, without what may change when a run is resumed."""
    return first_difference(*_to_compare(there, here))


def _check_has(data: Any, path: str) -> None:
    """Raises a ValueError unless the data are a table with this key."""
    inner, _, rest = path.partition(".")
    if not isinstance(data, dict) or (inner and inner not in data):
        raise ValueError(f"lacks {path}" if path else "is no table")
    if rest:
        _check_has(data[inner], rest)


def _called(record: Mapping[str, Any]) -> str:
    digest = f"({record['fingerprint'][:12]})"
    if "name" not in record:
        return f"{record.get('vocab_size')} tokens {digest}"
    return " ".join(filter(None, (repr(record["name"]), record.get("version"), digest)))


def is_longer(folder: RunFolder, config: TrainConfig) -> bool:
    """Whether the recipe differs from that of the folder by more steps only.

    The longer run ends with the same weights as one that had this many steps from the beginning. With the schedule `constant`
    every run can be lengthened, with `wsd` until its decay begins, with `cosine` none; a warm-up of None is a fraction of the
    run.

    Raises:
        CheckpointError: a step before the newest checkpoint has another learning rate in the longer run, or the run has a
            result and no checkpoint.
    """
    if not (folder.path / "config.json").exists():
        return False
    there, result = folder.config, folder.result
    before, now = _to_compare(there, config)
    if {**before, "steps": config.steps} != now or (result is not None and result.status == "diverged"):
        return False
    # A process that was killed before it removed the result has already written the longer recipe.
    ended = there.steps if result is None else result.steps
    if config.steps < there.steps or config.steps <= ended:
        return False
    if result is not None and not checkpoint_paths(folder.checkpoints):
        raise CheckpointError(
            f"run folder {folder.path}: has the result of {ended} steps and no checkpoint: must have one to go on to step "
            f"{config.steps}; restore {folder.checkpoints}, or train in a new folder"
        )
    taken, kind = newest_step(folder.checkpoints), config.schedule.to_data()["kind"]
    if (differing := _first_other_rate(there, config, taken)) is not None:
        raise CheckpointError(
            f"run folder {folder.path}: steps={there.steps} there, {config.steps} in this recipe: must be equal, since "
            f"step {differing} of {taken} taken has another learning rate in the longer {kind} schedule; train in "
            "a new folder, there from these weights if you like (`twoaxis train --help` shows how)"
        )
    return True


def lengthen(folder: RunFolder, config: TrainConfig, progress: Progress) -> None:
    """Writes the larger number of steps into the folder and removes the shorter run's result, if `is_longer`.

    Called last before the first step, so that whatever refuses the longer run leaves the shorter one unchanged.
    """
    if not is_longer(folder, config):
        return
    before = folder.config.steps
    if before < config.steps:
        folder.write("config", config.to_data())
        taken = newest_step(folder.checkpoints)
        progress.note(f"{folder.path}: goes on after step {taken} to step {config.steps}, instead of {before}")
    # After the recipe, so that a full disk leaves the shorter run unchanged.
    (folder.path / "result.json").unlink(missing_ok=True)


def _to_compare(there: TrainConfig, here: TrainConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two recipes without what may change when a run is resumed: the layout, and with it what a process computes at once."""
    with_layout = {"micro_batch_size", "recompute"} if there.parallel != here.parallel else set[str]()
    left_out = {"parallel", *with_layout}
    there_data, here_data = (
        {key: value for key, value in config.to_data().items() if key not in left_out} for config in (there, here)
    )
    return there_data, here_data


def _first_other_rate(there: TrainConfig, here: TrainConfig, taken: int) -> int | None:
    """The first step taken, counted from 1, with another learning rate in the longer run."""
    old, new = there.schedule, here.schedule
    changed = (n for n in range(taken) if old.multiplier(n, there.steps) != new.multiplier(n, here.steps))
    return next((n + 1 for n in changed), None)
