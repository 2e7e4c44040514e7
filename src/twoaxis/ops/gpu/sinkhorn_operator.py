"""Sinkhorn normalisation in kernels, on a GPU or a CPU: its operators in torch's library, and their gradient.

Letters: N rows (tokens), n streams.
"""

from typing import Any

import torch
from torch import Tensor

from twoaxis.ops import kernels
from twoaxis.ops.cpu import library
from twoaxis.ops.gpu import launch
from twoaxis.ops.precision import refuse_second_gradients

MOST_STREAMS = 4
"""A thread holds a matrix."""

OPTIONS = "int rounds, int first_axis, str start, float start_eps, float sum_eps"


def fake(logits: Tensor, rounds: int, first_axis: int, start: str, start_eps: float, sum_eps: float) -> Tensor:
    """The matrices, not computed."""
    return torch.empty(logits.shape, dtype=torch.float32, device=logits.device)


@kernels.operator(f"sinkhorn(Tensor logits, {OPTIONS}) -> Tensor", fake)
def _sinkhorn(logits: Tensor, rounds: int, first_axis: int, start: str, start_eps: float, sum_eps: float) -> Tensor:
    result = fake(logits, rounds, first_axis, start, start_eps, sum_eps)
    if logits.numel():
        from twoaxis.ops.gpu.sinkhorn_kernels import sinkhorn_forward

        constants, n_rows = _constants(logits, rounds, first_axis, start, start_eps, sum_eps)
        launch.start(sinkhorn_forward, launch.sinkhorn_blocks(), n_rows, kernels.ready(logits), result, **constants)
    return result


def _constants(
    logits: Tensor, rounds: int, first_axis: int, start: str, start_eps: float, sum_eps: float
) -> tuple[dict[str, Any], int]:
    n = len(logits)
    constants = {"SIZE": n, "ROUNDS": rounds, "FIRST": first_axis, "START": start, "START_EPS": start_eps, "SUM_EPS": sum_eps}
    return constants, logits.numel() // n**2


def fake_backward(
    grad: Tensor, logits: Tensor, rounds: int, first_axis: int, start: str, start_eps: float, sum_eps: float
) -> Tensor:
    """The gradient of the logits, not computed."""
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


@kernels.operator(f"sinkhorn_backward(Tensor grad, Tensor logits, {OPTIONS}) -> Tensor", fake_backward)
def _sinkhorn_backward(
    grad: Tensor, logits: Tensor, rounds: int, first_axis: int, start: str, start_eps: float, sum_eps: float
) -> Tensor:
    options = rounds, first_axis, start, start_eps, sum_eps
    result = fake_backward(grad, logits, *options)
    if logits.numel():
        from twoaxis.ops.gpu.sinkhorn_kernels import sinkhorn_backward

        constants, n_rows = _constants(logits, *options)
        sums = torch.empty(2 * rounds, len(logits), n_rows, dtype=torch.float32, device=logits.device)
        given = kernels.ready(grad), kernels.ready(logits), sums, result
        launch.start(sinkhorn_backward, launch.sinkhorn_blocks(), n_rows, *given, **constants)
    return result


class _Sinkhorn(torch.autograd.Function):
    """Saves the logits alone."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, options: tuple[Any, ...]) -> Tensor:
        ctx.save_for_backward(logits)
        ctx.options = options
        return torch.ops.twoaxis.sinkhorn(logits, *options)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        refuse_second_gradients("sinkhorn")
        (logits,) = ctx.saved_tensors
        return torch.ops.twoaxis.sinkhorn_backward(grad_outputs[0], logits, *ctx.options), None


def serves(logits: Tensor, start: str) -> bool:
    """Whether the kernels normalise these matrices: small ones, and not on logarithms."""
    served, most = launch.served(logits), MOST_STREAMS
    if library.concerned(logits):
        served, most = library.operator_served(logits), library.MOST_STREAMS
    return served and logits.shape[0] == logits.shape[1] <= most and start != "log"


def normalise(logits: Tensor, rounds: int, first_axis: int, start: str, start_eps: float, sum_eps: float) -> Tensor:
    """Computes `sinkhorn` with kernels."""
    options = rounds, first_axis, start, start_eps, sum_eps
    return _Sinkhorn.apply(logits, options) if torch.is_grad_enabled() else torch.ops.twoaxis.sinkhorn(logits, *options)
