"""One optimizer step: gradients of the mean loss over micro-batches, clipping by their norm, update."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from twoaxis.data import Batch
from twoaxis.train.optim import set_learning_rate

if TYPE_CHECKING:
    # Which imports this module for the steps of one process.
    from twoaxis.train.parallel.placement import Placement

BatchLoss = Callable[[Batch], Tensor]
"""The summed loss of a batch, with its graph."""


def accumulate_gradients(token_loss: BatchLoss, batch: Batch, rows: int, tokens: int | None = None) -> tuple[Tensor, int]:
    """Accumulates the gradient of the mean token loss of the batch over micro-batches of `rows` windows.

    The summed `token_loss` of each micro-batch is divided by the valid tokens of the whole batch, so all tokens weigh the same.
    A batch without a valid token has loss 0 and gradients 0.

    Args:
        token_loss: the summed loss of a batch.
        batch: the rows of this process.
        rows: windows of a micro-batch.
        tokens: valid tokens of all processes; None counts those of `batch`.

    Returns:
        The loss of these rows over all valid tokens, and their number.
    """
    tokens = batch.n_targets if tokens is None else tokens
    losses = []
    for part in batch.micro_batches(rows):
        loss = token_loss(part) / max(tokens, 1)
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum(), tokens


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The norm of all gradients together."""
    return nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])


def clip_gradients(
    parameters: Iterable[nn.Parameter],
    clip_norm: float | None,
    norm_of: Callable[[list[nn.Parameter]], Tensor] = gradient_norm,
) -> Tensor:
    """Clips the gradients to the norm, and returns their norm before clipping, which `norm_of` computes."""
    parameters = list(parameters)
    norm = norm_of(parameters)
    if clip_norm is not None:
        nn.utils.clip_grads_with_norm_(parameters, clip_norm, norm)
    return norm


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
    placement: "Placement",
    token_loss: BatchLoss,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    *,
    rows: int,
    multiplier: float,
    clip_norm: float | None,
) -> StepOutcome:
    """Takes one optimizer step and waits for the device once; a loss or norm may be not finite.

    Args:
        placement: of model and batch.
        token_loss: the summed loss of a batch.
        optimizer: of the parameters of this process.
        batch: of all processes.
        rows: windows of a micro-batch.
        multiplier: of the full learning rate.
        clip_norm: largest norm of the whole gradient; None does not clip.
    """
    set_learning_rate(optimizer, multiplier)
    loss, tokens = placement.accumulate(token_loss, batch, rows)
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    norm = clip_gradients(parameters, clip_norm, placement.norm)
    measured = torch.stack([placement.ranks.sum(loss.double()), norm.double()])
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    mean_loss, grad_norm = measured.tolist()
    return StepOutcome(mean_loss, grad_norm, tokens)
