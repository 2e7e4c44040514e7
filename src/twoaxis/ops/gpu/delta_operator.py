"""The delta write in kernels, on a GPU or a CPU: its operators in torch's library, and their gradient.

Letters: N rows (tokens), D width, C channels.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from twoaxis.ops import kernels
from twoaxis.ops.cpu import library
from twoaxis.ops.gpu import launch
from twoaxis.ops.precision import refuse_second_gradients

MOST_CHANNELS = 4
"""Kernels are compiled for their number, and more need more registers than there are."""


def fake_write(
    channels: Sequence[Tensor], direction: Tensor, targets: Tensor, beta: Tensor, eps: float, erases: bool
) -> list[Tensor]:
    """The written channels, not computed."""
    return [kernels.empty(x) for x in channels]


@kernels.operator(
    "delta_write(Tensor[] channels, Tensor direction, Tensor targets, Tensor beta, float eps, bool erases) -> Tensor[]",
    fake_write,
)
def _write(
    channels: Sequence[Tensor], direction: Tensor, targets: Tensor, beta: Tensor, eps: float, erases: bool
) -> list[Tensor]:
    results = fake_write(channels, direction, targets, beta, eps, erases)
    if not direction.numel():
        return results
    from twoaxis.ops.gpu.delta_kernels import delta_forward

    given = map(kernels.ready, (direction, targets, beta))
    _start(delta_forward, [kernels.ready(x) for x in channels], results, *given, eps=eps, erases=erases)
    return results


def _start(kernel: Any, channels: Sequence[Tensor], results: Sequence[Tensor], *others: Any, eps: float, erases: bool) -> None:
    D = channels[0].shape[-1]
    blocks = launch.row_blocks(launch.power_of_two(D))
    constants = {"WIDTH": D, "LANES": launch.power_of_two(D), "EPS": eps, "ERASES": erases}
    launch.start(kernel, blocks, channels[0].numel() // D, tuple(channels), tuple(results), *others, **constants)


def fake_backward(
    grads: Sequence[Tensor],
    channels: Sequence[Tensor],
    direction: Tensor,
    targets: Tensor,
    beta: Tensor,
    eps: float,
    erases: bool,
) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """The gradients of a write, not computed: of the channels, the direction, the targets and the gate."""
    return [kernels.empty(x) for x in channels], kernels.empty(direction), kernels.empty(targets), kernels.empty(beta)


@kernels.operator(
    "delta_write_backward(Tensor[] grads, Tensor[] channels, Tensor direction, Tensor targets, Tensor beta, float eps, "
    "bool erases) -> (Tensor[], Tensor, Tensor, Tensor)",
    fake_backward,
)
def _write_backward(
    grads: Sequence[Tensor],
    channels: Sequence[Tensor],
    direction: Tensor,
    targets: Tensor,
    beta: Tensor,
    eps: float,
    erases: bool,
) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    found = results, *others = fake_backward(grads, channels, direction, targets, beta, eps, erases)
    if not direction.numel():
        return found
    from twoaxis.ops.gpu.delta_kernels import delta_backward

    arrived = tuple(map(kernels.ready, grads))
    given = map(kernels.ready, (direction, targets, beta))
    _start(delta_backward, [kernels.ready(x) for x in channels], results, arrived, *given, *others, eps=eps, erases=erases)
    return found


class _DeltaWrite(torch.autograd.Function):
    """Saves its inputs alone: products and norms of a row are taken again while the row is in registers."""

    @staticmethod
    def forward(
        ctx: Any, direction: Tensor, targets: Tensor, beta: Tensor, eps: float, erases: bool, *channels: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(direction, targets, beta, *channels)
        ctx.eps, ctx.erases = eps, erases
        return tuple(torch.ops.twoaxis.delta_write(channels, direction, targets, beta, eps, erases))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_gradients("delta_writes")
        direction, targets, beta, *channels = ctx.saved_tensors
        given = grad_outputs, channels, direction, targets, beta, ctx.eps, ctx.erases
        grad_channels, *others = torch.ops.twoaxis.delta_write_backward(*given)
        found = *others, None, None, *grad_channels
        return tuple(one if want else None for one, want in zip(found, ctx.needs_input_grad, strict=True))


def serves(channels: Sequence[Tensor], direction: Tensor, targets: Tensor, beta: Tensor) -> bool:
    """Whether the kernels compute a write to these channels: few of them, whose rows fit, and with tensors for all rows."""
    shape = direction.shape
    alike = beta.shape == shape[:-1] == targets.shape[1:] and all(x.shape == shape for x in channels)
    if library.concerned(direction):
        return alike and library.operator_served(*channels, direction, targets, beta)
    few = len(channels) <= MOST_CHANNELS and shape[-1] <= launch.MOST_LANES
    return alike and few and all(map(launch.served, (*channels, direction, targets, beta)))


def write(
    channels: Sequence[Tensor], direction: Tensor, targets: Tensor, beta: Tensor, eps: float, erases: bool
) -> tuple[Tensor, ...]:
    """Computes `delta_writes` with kernels."""
    if not torch.is_grad_enabled():
        return tuple(torch.ops.twoaxis.delta_write(list(channels), direction, targets, beta, eps, erases))
    return _DeltaWrite.apply(direction, targets, beta, eps, erases, *kernels.distinct(channels))
