"""What a process holds of the model, of a batch and of a checkpoint: everything, unless a subclass says otherwise."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from twoaxis.data import Batch
from twoaxis.model import Decoder, DecoderConfig
from twoaxis.train.checkpoint import Checkpoint, load_newest, save_checkpoint
from twoaxis.train.optim import Change, ParameterGroup, of_wholes
from twoaxis.train.parallel.ranks import Ranks
from twoaxis.train.recipe import TrainConfig
from twoaxis.train.step import BatchLoss, accumulate_gradients, gradient_norm
from twoaxis.train.token_loss import TokenLoss
from twoaxis.train.training_state import (
    model_tensors,
    optimizer_tensors,
    parameters_sha256,
    restore_model,
    restore_optimizer,
)


class Losses(Protocol):
    """The losses of a model; `TokenLoss` is one."""

    device: torch.device
    dtype: torch.dtype

    def __call__(self, batch: Batch) -> Float[Tensor, ""]:
        """The sum of the token losses of the batch in nats, with its graph."""
        ...

    def evaluate(self, batch: Batch) -> Float[Tensor, ""]:
        """The same sum without gradients."""
        ...

    def hits(self, batch: Batch) -> Int[Tensor, ""]:
        """The number of targets that are the most likely token."""
        ...


class Placement:
    """One process, which holds everything.

    Attributes:
        ranks: the processes of the run.
        initial_sha256: the SHA-256 of the initial value of every whole parameter, by name, after `build`.
    """

    def __init__(self, ranks: Ranks | None = None) -> None:
        self.ranks = ranks or Ranks()
        self.initial_sha256: dict[str, str] = {}

    def build(self, config: TrainConfig, decoder: DecoderConfig, device: torch.device) -> Decoder:
        """Builds what this process holds of the decoder, with its initial values."""
        model = Decoder.build(decoder, config.seed)
        self.initial_sha256 = parameters_sha256(model)
        return model.to(device)

    def whole(self, model: Decoder) -> Decoder:
        """A decoder with all parameters, for their names and declarations."""
        return model

    def losses(self, model: Decoder, config: TrainConfig) -> Losses:
        """How the losses of the decoder are computed."""
        return TokenLoss(model, config)

    def local(self, groups: Iterable[ParameterGroup], model: Decoder) -> list[ParameterGroup]:
        """The groups of the whole decoder with the parameters that this process updates."""
        del model
        return list(groups)

    def rows(self, batch: Batch) -> Batch:
        """The rows of a batch that this process computes."""
        return batch

    def accumulate(self, token_loss: BatchLoss, batch: Batch, rows: int) -> tuple[Tensor, int]:
        """Accumulates the gradients of the parameters that this process updates, in micro-batches of `rows` windows.

        Returns:
            The part of this process of the mean loss over the valid tokens of the whole batch, and their number.
        """
        return accumulate_gradients(token_loss, batch, rows)

    def norm(self, parameters: list[nn.Parameter]) -> Tensor:
        """The norm of the gradients of all processes."""
        return gradient_norm(parameters)

    def of_wholes(self, held: Mapping[str, Tensor], change: Change) -> Iterable[tuple[str, Tensor]]:
        """Yields, by name, what this process holds of changed tensors like its parameters, each of which is changed whole."""
        return of_wholes(held, change)

    def end_validation(self, model: Decoder) -> None:
        """Frees what a pass without gradients has gathered."""

    def checkpoint(
        self,
        folder: Path,
        step: int,
        model: Decoder,
        optimizer: torch.optim.Optimizer,
        state: Any,
        keep: int,
        copied: bool = False,
    ) -> Callable[[], None]:
        """Returns what writes a checkpoint and then removes all but the newest `keep`.

        Args:
            folder: of the checkpoints.
            step: steps taken.
            model: whose parameters to write.
            optimizer: whose state to write.
            state: other JSON-ready data.
            keep: how many to keep.
            copied: whether tensors are copied now, so that training may go on before they are written.

        Raises:
            CheckpointError: of what is returned: the disk is full or cannot be written; earlier checkpoints are unchanged.
        """
        tensors, moments = model_tensors(model), optimizer_tensors(model, optimizer)
        if copied:
            tensors, moments = ({name: one.clone() for name, one in found.items()} for found in (tensors, moments))
        checkpoint = Checkpoint(step, tensors, moments, state)

        def write() -> None:
            save_checkpoint(folder, checkpoint, keep)

        return write

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
    if ranks.mesh is None:
        return Placement(ranks)
    # Only here, since these imports take seconds.
    if ranks.mesh.size(0) > 1:
        from twoaxis.train.parallel.pipelined import Pipelined

        return Pipelined(ranks)
    if ranks.mesh.size(3) > 1:
        from twoaxis.train.parallel.tensor_sharded import TensorSharded

        return TensorSharded(ranks)
    from twoaxis.train.parallel.sharded_rank import Sharded

    return Sharded(ranks)
