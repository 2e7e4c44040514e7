"""The inverse rms of a source in kernels, on a GPU or a CPU: its operators in torch's library, and their gradient.

Letters: N rows (tokens), D width.
"""

from typing import Any

import torch
from torch import Tensor

from twoaxis.ops import kernels
from twoaxis.ops.gpu import launch
from twoaxis.ops.precision import refuse_second_gradients


def _constants(x: Tensor) -> tuple[launch.Blocks, int, dict[str, int]]:
    """The blocks, the number of rows, and the constants of both kernels."""
    D = x.shape[-1]
    lanes = launch.power_of_two(D)
    return launch.row_blocks(lanes), x.numel() // D, {"WIDTH": D, "LANES": lanes}


def fake(x: Tensor, eps: float) -> Tensor:
    """The factors, not computed."""
    return torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)


@kernels.operator("inverse_rms(Tensor x, float eps) -> Tensor", fake)
def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    factors = fake(x, eps)
    blocks, n_rows, constants = _constants(x)
    if n_rows:
        from twoaxis.ops.gpu.norm_kernels import inverse_rms_forward

        launch.start(inverse_rms_forward, blocks, n_rows, kernels.ready(x), factors, eps, **constants)
    return factors


def fake_backward(x: Tensor, factors: Tensor, by_factor: Tensor, passed: Tensor | None) -> Tensor:
    """The gradient of the source, not computed."""
    return kernels.empty(x)


@kernels.operator("inverse_rms_backward(Tensor x, Tensor factors, Tensor by_factor, Tensor? passed) -> Tensor", fake_backward)
def _inverse_rms_backward(x: Tensor, factors: Tensor, by_factor: Tensor, passed: Tensor | None) -> Tensor:
    result = fake_backward(x, factors, by_factor, passed)
    blocks, n_rows, constants = _constants(x)
    if n_rows:
        from twoaxis.ops.gpu.norm_kernels import inverse_rms_backward

        given = (None if one is None else kernels.ready(one) for one in (x, factors, by_factor, passed))
        launch.start(inverse_rms_backward, blocks, n_rows, *given, result, **constants)
    return result


class _SourceFactor(torch.autograd.Function):
    """Saves the source and its factor; passes the source on if asked to, as `_DepthRead` does."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, eps: float, passes: bool) -> tuple[Tensor, ...]:
        factors = torch.ops.twoaxis.inverse_rms(v, eps)
        ctx.save_for_backward(v, factors)
        ctx.set_materialize_grads(False)
        return (factors, v.detach()) if passes else (factors,)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_gradients("source_factor")
        v, factors = ctx.saved_tensors
        by_factor, passed = grad_outputs[0], grad_outputs[1] if len(grad_outputs) > 1 else None
        if by_factor is None:
            return passed, None, None
        return torch.ops.twoaxis.inverse_rms_backward(v, factors, by_factor, passed), None, None


def source_factor(v: Tensor, eps: float, passes: bool) -> tuple[Tensor, ...]:
    """Computes `source_factor` with kernels; if it passes the source on, this is the second result."""
    if not torch.is_grad_enabled():
        return (torch.ops.twoaxis.inverse_rms(v, eps), v)
    return _SourceFactor.apply(v, eps, passes)
