"""The model of a run folder, for those who want to use it."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from twoaxis.core.config import is_record, with_overrides
from twoaxis.core.errors import CheckpointError, ConfigError, problem
from twoaxis.core.files import check_new_folder, check_utf8, default_name, new_folder
from twoaxis.core.parameters import materialize
from twoaxis.data import Tokenizer
from twoaxis.data.tokenizer import SubwordTokenizer
from twoaxis.data.tokenizer.subword import before_text
from twoaxis.model import Decoder, DecoderConfig
from twoaxis.train.checkpoint import Checkpoint, load_asked, write_checkpoint
from twoaxis.train.loop import train
from twoaxis.train.metrics import Result
from twoaxis.train.progress import Progress
from twoaxis.train.recipe import DataConfig, TrainConfig, read_recipe
from twoaxis.train.run_folder import RunFolder, json_bytes
from twoaxis.train.training_state import model_tensors, parameters_sha256, restore_model

TOKENIZER_FILE = "tokenizer_file.json"
"""The `tokenizer.json` of a model from elsewhere, in its run folder."""


class Trained(NamedTuple):
    """What a run has made.

    Attributes:
        model: with the weights of the checkpoint.
        tokenizer: of the run.
        config: the recipe.
        step: steps the weights have taken.
    """

    model: Decoder
    tokenizer: Tokenizer
    config: TrainConfig
    step: int


@dataclass(frozen=True)
class Run:
    """A run that has been trained, or has stopped on the way.

    Attributes:
        folder: of the run, for `twoaxis.load` and every verb that takes a run.
        result: its numbers, such as `validation_loss`.
    """

    folder: Path
    result: Result

    @property
    def model(self) -> Decoder:
        """The model of the newest checkpoint, read anew as by `twoaxis.load`."""
        return Decoder.from_pretrained(self.folder)


def train_recipe(
    recipe: TrainConfig | Mapping[str, Any] | Path | str,
    run: Path | str | None = None,
    overrides: Sequence[str] = (),
    progress: Progress | None = None,
) -> Run:
    """Trains a recipe, or goes on where an earlier call with the same folder stopped.

    Args:
        recipe: a TOML or JSON file, the same as data, or a configuration.
        run: the folder of the run; None is that of `default_folder`.
        overrides: changes as `key=value`.
        progress: called while the run goes on; None shows nothing. `console_progress()` of twoaxis.train shows a bar.

    Raises:
        ConfigError: a recipe that cannot be run, or that of a model from elsewhere, in another folder than its weights.
        DataError: a corpus or tokenizer that cannot be used.
        CheckpointError: a folder of another run.
    """
    if isinstance(recipe, Path | str):
        config = read_recipe(Path(recipe), overrides)
    else:
        config = with_overrides(TrainConfig.parse(recipe), overrides)
    folder = default_folder(recipe, config) if run is None else Path(run)
    if (said := new_weights(recipe, folder)) and progress:
        progress.note(said)
    return Run(folder, train(config, folder, progress))


def default_folder(recipe: object, config: TrainConfig) -> Path:
    """The folder of a run when none is named: that of a recorded recipe, else one in `runs`.

    The one in `runs` is named after the file or by the content of the recipe.
    """
    # The recipe of an imported model does not hold its weights: elsewhere it would train a new one.
    if isinstance(recipe, Path | str) and is_record(Path(recipe)):
        return Path(recipe).parent
    return Path("runs") / default_name("train", recipe, config)


def new_weights(recipe: object, folder: Path) -> str:
    """Says that the recipe of a run trains new weights, where it begins in another folder; "" where it does not.

    Raises:
        ConfigError: nothing but the weights of that run is its own: a model from elsewhere that has not been trained yet.
    """
    if not isinstance(recipe, Path | str) or not is_record(Path(recipe)) or RunFolder(folder).is_begun:
        return ""
    record = RunFolder(Path(recipe).parent)
    if not record.is_begun or folder.resolve() == record.path.resolve():
        return ""
    if not (record.path / "data.json").is_file():
        allowed = f"{str(record.path)!r}, since the recipe there does not hold its weights"
        raise ConfigError(problem("run folder", str(folder), allowed, "train there, or copy that folder and train the copy"))
    return f"new weights are trained, by the recipe of {record.path}; train in that folder to go on with those of that run"


def load_trained(run_dir: Path | str, step: int | None = None) -> Trained:
    """Reads the model of a run folder on the CPU; nothing in the folder is changed.

    Args:
        run_dir: of the run.
        step: whose checkpoint to read; None reads the newest.

    Raises:
        CheckpointError: no run folder, or a checkpoint that is missing or damaged: another one is never read in its place.
    """
    folder = RunFolder(check_utf8(Path(run_dir), "run folder"))
    config, tokenizer = folder.config, folder.tokenizer
    checkpoint = load_asked(folder.checkpoints, step)
    if checkpoint is None:
        raise CheckpointError(f"run folder {folder.path}: has no checkpoint yet; must have one; train for longer")
    model = materialize(lambda: Decoder(config.decoder(tokenizer.vocab_size)))
    restore_model(model, checkpoint.model)
    return Trained(model, tokenizer, config, checkpoint.step)


def new_run(run_dir: Path | str, model: DecoderConfig, tokenizer: Tokenizer, recipe: Mapping[str, Any]) -> TrainConfig:
    """The whole recipe of a run that is to begin with a model from elsewhere; nothing is written.

    Args:
        run_dir: of the new run.
        model: its configuration.
        tokenizer: of the model.
        recipe: what to train it by, as data of a `TrainConfig` without `model` and tokenizer; the rest has its defaults.

    Raises:
        DataError: the folder is not empty.
        ConfigError: a recipe that cannot be run.
    """
    check_new_folder(Path(run_dir), "run folder")
    if tokenizer.vocab_size > model.vocab_size:
        allowed = f"at most the model's vocab_size={model.vocab_size}"
        raise ConfigError(problem("tokens of the tokenizer", tokenizer.vocab_size, allowed, "use the tokenizer of the model"))
    data = recipe.get("data", {})
    if isinstance(data, Mapping):
        _refuse("data.tokenizer", data)
        data = {"seq_len": min(DataConfig().seq_len, model.max_seq_len), **data}
        if isinstance(tokenizer, SubwordTokenizer):
            # Relative, so that the folder may be moved.
            end = json.loads(tokenizer.definition)["end_of_document"]
            data["tokenizer"] = {"kind": "file", "path": TOKENIZER_FILE, "end_of_document": end, "within": "run_folder"}
    _refuse("model", recipe)
    return TrainConfig.from_data({**recipe, "model": model.to_data(), "data": data})


def _file_of(tokenizer: SubwordTokenizer) -> dict[str, Any]:
    """The content of a `tokenizer.json` that begins documents as the tokenizer does."""
    content = json.loads(tokenizer.definition)["tokenizer"]
    if before_text(content["post_processor"]) != tokenizer.begin_of_document:
        # A run of an older version began its documents with nothing, whatever its file says.
        content["post_processor"] = None
    return content


def _refuse(key: str, data: Mapping[str, Any]) -> None:
    if key.rpartition(".")[2] in data:
        raise ConfigError(f"{key}: must be left out, since the run begins with a model and its tokenizer; remove it")


def save_trained(
    run_dir: Path | str,
    model: Decoder,
    tokenizer: Tokenizer,
    recipe: Mapping[str, Any] | None = None,
    write_more: Callable[[Path], None] | None = None,
) -> Path:
    """Writes a run folder around a model from elsewhere: for `load_trained`, and for `train` to begin with these weights.

    Args:
        run_dir: of the new run; it appears whole or not at all.
        model: whose parameters are those before the first step.
        tokenizer: of the model.
        recipe: as in `new_run`.
        write_more: into the folder, before it appears.

    Raises:
        DataError: the folder is not empty, or cannot be written.
        ConfigError: a recipe that cannot be run.
    """
    config, path = new_run(run_dir, model.config, tokenizer, recipe or {}), Path(run_dir).absolute()
    definition = json.loads(tokenizer.definition)
    with new_folder(path, "run folder") as folder:
        write_checkpoint(RunFolder(folder).checkpoints, Checkpoint(0, model_tensors(model), {}, {}))
        if isinstance(tokenizer, SubwordTokenizer):
            (folder / TOKENIZER_FILE).write_text(json.dumps(_file_of(tokenizer)), encoding="utf-8")
        (folder / "tokenizer.json").write_bytes(json_bytes(definition))
        (folder / "config.json").write_bytes(json_bytes(config.to_data()))
        (folder / "initial_parameters.json").write_bytes(json_bytes(parameters_sha256(model)))
        if write_more is not None:
            write_more(folder)
    return path
