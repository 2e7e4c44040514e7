"""One optimizer step: gradients of the mean loss over all valid tokens of the batch, clipping, update."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from twoaxis.data import Batch
from twoaxis.train.optim import set_learning_rate


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


def accumulate_gradients(token_loss: Callable[[Batch], Tensor], batch: Batch, rows: int) -> tuple[Tensor, int]:
    """Accumulates the gradient of the mean token loss of the batch over micro-batches of `rows` windows.

    The summed `token_loss` of each micro-batch is divided by the valid tokens of the whole batch, so all tokens weigh the same.
    A batch without a valid token has loss 0 and gradients 0.

    Returns:
        The mean loss, and the number of valid tokens.
    """
    tokens = batch.n_targets
    losses = []
    for part in batch.micro_batches(rows):
        loss = token_loss(part) / max(tokens, 1)
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum(), tokens


def clip_gradients(parameters: Iterable[nn.Parameter], clip_norm: float | None) -> Tensor:
    """Clips the gradients to the norm, and returns their norm before clipping."""
    parameters = list(parameters)
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if clip_norm is not None:
        nn.utils.clip_grads_with_norm_(parameters, clip_norm, norm)
    return norm


def take_step(
    token_loss: Callable[[Batch], Tensor],
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    *,
    rows: int,
    multiplier: float,
    clip_norm: float | None,
) -> StepOutcome:
    """Takes one optimizer step and waits for the device once; a loss or norm may be not finite."""
    set_learning_rate(optimizer, multiplier)
    loss, tokens = accumulate_gradients(token_loss, batch, rows)
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    norm = clip_gradients(parameters, clip_norm)
    measured = torch.stack([loss.double(), norm.double()])
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    mean_loss, grad_norm = measured.tolist()
    return StepOutcome(mean_loss, grad_norm, tokens)
