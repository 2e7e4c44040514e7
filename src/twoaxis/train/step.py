"""One optimizer step: forward pass, gradients of the mean loss, clipping, update."""

from typing import NamedTuple

import torch

from twoaxis.data import Batch
from twoaxis.train.gradients import clip_gradients
from twoaxis.train.optim import set_learning_rate
from twoaxis.train.parallel.placement import BatchLoss, Placement


class StepOutcome(NamedTuple):
    """The measurements of one step.

    Attributes:
        loss: mean over the valid tokens of the whole batch in nats, before the update; 0 when there is none.
        grad_norm: norm of the whole gradient, before clipping.
        tokens: valid tokens of the whole batch.
    """

    loss: float
    grad_norm: float
    tokens: int


def take_step(
    token_loss: BatchLoss,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    *,
    rows: int,
    multiplier: float,
    clip_norm: float | None,
    placement: Placement | None = None,
) -> StepOutcome:
    """Takes one optimizer step and waits for the device once; a loss or norm may be not finite.

    Args:
        token_loss: the summed loss of a batch.
        optimizer: of the parameters of this process.
        batch: of all processes.
        rows: windows of a micro-batch.
        multiplier: of the full learning rate.
        clip_norm: largest norm of the whole gradient; None does not clip.
        placement: of model and batch; None is one process.
    """
    placement = placement or Placement()
    set_learning_rate(optimizer, multiplier)
    loss, tokens = placement.accumulate(token_loss, batch, rows)
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    norm = clip_gradients(parameters, clip_norm, placement.norm)
    measured = torch.stack([placement.ranks.sum(loss.double()), norm.double()])
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    mean_loss, grad_norm = measured.tolist()
    return StepOutcome(mean_loss, grad_norm, tokens)
