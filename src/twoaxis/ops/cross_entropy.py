"""Next-token cross-entropy from hidden states, in nats, without storing the logits.

Letters: N tokens, D width, V vocabulary.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from twoaxis.core.errors import DataError, problem
from twoaxis.ops.precision import Impl, check_impl, refuse_second_gradients, statistics_dtype

IGNORE = -100
"""The target of tokens that carry no loss."""

ROWS_AT_ONCE = 1024
"""Tokens whose logits exist at the same time in the fused engine."""


def linear_cross_entropy(
    hidden: Float[Tensor, "N D"], weight: Float[Tensor, "V D"], targets: Int[Tensor, " N"], impl: Impl = "fused"
) -> Float[Tensor, ""]:
    """Returns the sum over tokens of -log softmax(hidden @ weight^T)[target]; targets equal to IGNORE add nothing.

    The sum, not the mean: the caller divides once by the number of valid tokens of the whole batch. Without a
    valid token the sum and all gradients are 0.

    Raises:
        DataError: another target outside the vocabulary. On a GPU the lookup itself raises, some steps later.

    Cost: matmul flops 2*D*V per token forward; the fused engine saves the gradients of hidden and weight, no logits

    Example:
        >>> linear_cross_entropy(torch.zeros(3, 2), torch.zeros(4, 2), torch.tensor([0, 1, IGNORE]))
        tensor(2.7726)
    """
    check_impl(impl)
    if targets.device.type == "cpu" and not torch.compiler.is_compiling():
        _check_targets(targets, weight.shape[0])
    return cross_entropy_of_valid(hidden, weight, targets, impl)


def cross_entropy_of_valid(
    hidden: Float[Tensor, "N D"], weight: Float[Tensor, "V D"], targets: Int[Tensor, " N"], impl: Impl
) -> Float[Tensor, ""]:
    """The same for targets that need no check, such as those without memory, which have no values."""
    if impl == "reference":
        logits = hidden @ weight.T
        return F.cross_entropy(logits.to(statistics_dtype(logits)), targets, ignore_index=IGNORE, reduction="sum")
    # The meta device has no autocast.
    if torch.amp.is_autocast_available(hidden.device.type) and torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            return _LinearCrossEntropy.apply(hidden, weight, targets)
    return _LinearCrossEntropy.apply(hidden, weight, targets)


def _check_targets(targets: Tensor, vocab_size: int) -> None:
    wrong = (targets != IGNORE) & ((targets < 0) | (targets >= vocab_size))
    if wrong.any():
        allowed = f"in 0..{vocab_size - 1}, or {IGNORE} for a token without a loss"
        raise DataError(problem("target", int(targets[wrong][0]), allowed, f"write {IGNORE} where there is none"))


class _LinearCrossEntropy(torch.autograd.Function):
    """Computes the gradients in the forward pass, while the logits of a chunk of tokens exist."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        needs_hidden, needs_weight = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        dtype = statistics_dtype(hidden)
        total = torch.zeros((), dtype=dtype, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=dtype) if needs_weight else None
        for start in range(0, hidden.shape[0], ROWS_AT_ONCE):
            rows = hidden[start : start + ROWS_AT_ONCE]
            target = targets[start : start + ROWS_AT_ONCE]
            valid = target != IGNORE
            safe = torch.where(valid, target, 0).unsqueeze(-1)
            logp = torch.log_softmax((rows @ weight.T).to(dtype), dim=-1)
            total -= (logp.gather(-1, safe).squeeze(-1) * valid).sum()
            if not needs_hidden and not needs_weight:
                continue
            grad = logp.exp_()
            grad.scatter_add_(-1, safe, torch.full_like(safe, -1, dtype=dtype)).mul_(valid.unsqueeze(-1))
            grad = grad.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[start : start + ROWS_AT_ONCE])
            if grad_weight is not None:
                grad_weight += grad.T @ rows
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        refuse_second_gradients("linear_cross_entropy", "call it on hidden states with impl='reference'")
        (grad,) = grad_outputs
        grad_hidden, grad_weight = ctx.saved_tensors
        return (
            None if grad_hidden is None else (grad_hidden * grad).to(grad_hidden.dtype),
            None if grad_weight is None else (grad_weight * grad).to(ctx.weight_dtype),
            None,
        )
