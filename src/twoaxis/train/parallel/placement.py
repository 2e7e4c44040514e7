"""What a process holds of the model, of a batch and of a checkpoint: everything, unless a subclass says otherwise."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from twoaxis.data import Batch
from twoaxis.model import Decoder, DecoderConfig
from twoaxis.train.checkpoint import Checkpoint, load_newest, save_checkpoint
from twoaxis.train.optim import ParameterGroup
from twoaxis.train.parallel.ranks import Ranks
from twoaxis.train.training_state import (
    model_tensors,
    optimizer_tensors,
    parameters_sha256,
    restore_model,
    restore_optimizer,
)


class Placement:
    """One process, which holds everything.

    Attributes:
        ranks: the processes of the run.
        initial_sha256: the SHA-256 of the initial value of every whole parameter, by name, after `build`.
    """

    def __init__(self, ranks: Ranks | None = None) -> None:
        self.ranks = ranks or Ranks()
        self.initial_sha256: dict[str, str] = {}

    def build(self, config: DecoderConfig, seed: int, device: torch.device) -> Decoder:
        """Builds the decoder with its initial values."""
        model = Decoder.build(config, seed)
        self.initial_sha256 = parameters_sha256(model)
        return model.to(device)

    def local(self, groups: Iterable[ParameterGroup]) -> list[ParameterGroup]:
        """The groups with the parameters that this process updates."""
        return list(groups)

    def rows(self, batch: Batch) -> Batch:
        """The rows of a batch that this process computes."""
        return batch

    def take_gradients(self) -> None:
        """Gives the gradients of the model to the parameters that this process updates."""

    def end_validation(self, model: Decoder) -> None:
        """Frees what a pass without gradients has gathered."""

    def whole_norm(self, norm: Tensor) -> Tensor:
        """The norm of the gradients of all processes, from that of this one."""
        return norm

    def save(self, folder: Path, step: int, model: Decoder, optimizer: torch.optim.Optimizer, state: Any, keep: int) -> None:
        """Writes a checkpoint, then removes all but the newest `keep`.

        Raises:
            CheckpointError: the disk is full or cannot be written; earlier checkpoints are unchanged.
        """
        checkpoint = Checkpoint(step, model_tensors(model), optimizer_tensors(model, optimizer), state)
        save_checkpoint(folder, checkpoint, keep)

    def restore(
        self, folder: Path, model: Decoder, optimizer: torch.optim.Optimizer, say: Callable[[str], None]
    ) -> tuple[int, dict[str, Any]] | None:
        """Restores model and optimizer from the newest intact checkpoint; returns its step and state, None without any.

        Raises:
            CheckpointError: all checkpoints are damaged, or belong to another model.
        """
        checkpoint = load_newest(folder, say)
        if checkpoint is None:
            return None
        restore_model(model, checkpoint.model)
        # The checkpoint of an imported model has nothing but weights.
        if "sampler" in checkpoint.state:
            restore_optimizer(model, optimizer, checkpoint.optimizer)
        return checkpoint.step, checkpoint.state


def placement_of(ranks: Ranks) -> Placement:
    """What a process of these ranks holds."""
    if ranks.count == 1:
        return Placement(ranks)
    # Only here, since the import takes long.
    from twoaxis.train.parallel.sharded import Sharded

    return Sharded(ranks)
