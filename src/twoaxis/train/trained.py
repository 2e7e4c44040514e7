"""The model of a run folder, for those who want to use it."""

from pathlib import Path
from typing import NamedTuple

from twoaxis.core.errors import CheckpointError
from twoaxis.data import Tokenizer
from twoaxis.model import Decoder
from twoaxis.train.checkpoint import load_newest
from twoaxis.train.progress import Progress
from twoaxis.train.recipe import TrainConfig
from twoaxis.train.run_folder import RunFolder
from twoaxis.train.training_state import restore_model


class Trained(NamedTuple):
    """What a run has made.

    Attributes:
        model: with the weights of the newest intact checkpoint.
        tokenizer: of the run.
        config: the recipe.
        step: steps the weights have taken.
    """

    model: Decoder
    tokenizer: Tokenizer
    config: TrainConfig
    step: int


def load_trained(run_dir: Path | str, progress: Progress | None = None) -> Trained:
    """Reads the model of a run folder on the CPU; nothing in the folder is changed.

    Raises:
        CheckpointError: no run folder, or no intact checkpoint in it.
    """
    folder = RunFolder(run_dir)
    config, tokenizer = folder.config, folder.tokenizer
    checkpoint = load_newest(folder.checkpoints, (progress or Progress()).note)
    if checkpoint is None:
        raise CheckpointError(f"run folder {folder.path}: has no checkpoint yet; must have one; train for longer")
    model = Decoder(config.decoder(tokenizer.vocab_size))
    restore_model(model, checkpoint.model)
    return Trained(model, tokenizer, config, checkpoint.step)
