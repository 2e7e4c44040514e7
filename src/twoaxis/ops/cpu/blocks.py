"""The C kernels of what every block has: RMS norm, rotation of queries and keys, and the gate of a feed-forward.

Letters: B batch, T position, H heads, K key width, D width, F hidden width.
"""

from torch import Tensor

from twoaxis.ops.cpu import library
from twoaxis.ops.gpu import launch


def silu_gate(x: Tensor) -> Tensor:
    """Computes `silu_gate`."""
    result = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
    library.call("silu_gate", launch.ready(x), result, library.n_rows(result), result.shape[-1])
    return result


def silu_gate_backward(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of gate and value."""
    result = launch.empty(x)
    library.call("silu_gate_backward", launch.ready(grad), launch.ready(x), result, library.n_rows(grad), grad.shape[-1])
    return result


def serves_rotation(x: Tensor, cosines: Tensor, sines: Tensor) -> bool:
    """Whether the kernels rotate these heads by fixed angles."""
    if x.ndim != 4:
        return False
    (B, T, _, K), turns = x.shape, cosines.shape
    fits = K % 2 == 0 and turns in ((1, T, 1, K), (B, T, 1, K)) and sines.shape == turns
    fixed = not (cosines.requires_grad or sines.requires_grad) and cosines.is_contiguous() and sines.is_contiguous()
    return fits and fixed and library.served(x, cosines, sines)


def rotate(x: Tensor, cosines: Tensor, sines: Tensor, backward: bool) -> Tensor:
    """Computes `rotate`, or the gradient of what is rotated."""
    x = launch.materialised(x)
    (B, T, H, K), result = x.shape, launch.empty(x)
    # Heads that are cut from a joint product need no copy.
    by_sequence, by_row, by_head, by_channel = x.stride()
    stride = by_row if T > 1 else by_sequence
    if by_channel != 1 or (H > 1 and by_head != K) or (B > 1 and by_sequence != T * stride):
        x, stride = x.contiguous(), H * K
    library.call("rotate", x, cosines, sines, result, backward, B * T, H, K, stride, max(1, library.n_rows(cosines)))
    return result


def rms_norm(x: Tensor, gain: Tensor | None, eps: float, scale: float) -> tuple[Tensor, Tensor]:
    """Computes `rms_norm`: the result, and the factor of each row."""
    result, factors = launch.empty(x), x.new_empty(*x.shape[:-1], 1)
    given = launch.ready(x), None if gain is None else launch.ready(gain)
    library.call("rms_norm", *given, result, factors, float(eps), float(scale), library.n_rows(x), x.shape[-1])
    return result, factors


def rms_norm_backward(
    grad: Tensor, x: Tensor, gain: Tensor | None, factors: Tensor, scale: float
) -> tuple[Tensor, Tensor | None]:
    """The gradients of the input and of the gain."""
    result, grad_gain = launch.empty(x), None if gain is None else launch.empty(gain)
    given = launch.ready(grad), launch.ready(x), None if gain is None else launch.ready(gain), factors
    library.call(
        "rms_norm_backward",
        *given,
        result,
        grad_gain,
        library.scratch(2 * x.shape[-1]),
        float(scale),
        library.n_rows(x),
        x.shape[-1],
    )
    return result, grad_gain
