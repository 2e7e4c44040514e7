"""One optimizer step: gradients of the mean loss over every valid token of the batch, clipped, applied."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from twoaxis.data import Batch
from twoaxis.train.optim import set_learning_rate


class StepOutcome(NamedTuple):
    """What one step measured.

    Attributes:
        loss: mean over the valid tokens of the whole batch in nats, before the update; 0 when there is none.
        grad_norm: norm of the whole gradient, before clipping.
        tokens: valid tokens of the whole batch.
    """

    loss: float
    grad_norm: float
    tokens: int


def accumulate_gradients(token_loss: Callable[[Batch], Tensor], batch: Batch, rows: int) -> tuple[Tensor, int]:
    """Adds the gradient of the mean token loss of the batch, however it is cut into micro-batches.

    Every micro-batch is divided by the valid tokens of the whole batch, so tokens weigh the same wherever they
    are. A micro-batch without a valid token adds nothing; a batch without one has loss 0 and gradients 0.

    Args:
        token_loss: the sum of the token losses of a micro-batch, with its graph.
        batch: on the CPU.
        rows: windows in a micro-batch.

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
    """Scales the gradients down to the norm if they are larger, and returns their norm before that."""
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
    """Takes one optimizer step and waits for the device once.

    A loss or norm that is not finite is returned like any other; the parameters are then worthless.
    """
    set_learning_rate(optimizer, multiplier)
    loss, tokens = accumulate_gradients(token_loss, batch, rows)
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    norm = clip_gradients(parameters, clip_norm)
    measured = torch.stack([loss.double(), norm.double()])
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    mean_loss, grad_norm = measured.tolist()
    return StepOutcome(mean_loss, grad_norm, tokens)
