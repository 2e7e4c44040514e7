"""Gradients of the mean loss over micro-batches, and their norm."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from twoaxis.data import Batch


def accumulate_gradients(
    token_loss: Callable[[Batch], Tensor], batch: Batch, rows: int, tokens: int | None = None
) -> tuple[Tensor, int]:
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
