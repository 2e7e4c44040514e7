"""The delta write in Triton: whole rows in registers, one sweep in each direction, nothing saved but the inputs.

Letters: N rows, D width, C channels. A tile is [rows, lanes]: `ROWS` rows, padded to a power of two. Channels are a tuple of
tensors of exact length and stream by, while the direction stays. Every load is converted to float32 at once. Targets are [C N].
"""

import triton
import triton.language as tl

from twoaxis.ops.gpu.norm_kernels import row_tile


@triton.jit
def direction_of(direction, place, there, EPS: tl.constexpr):
    """The direction, and the factor that makes it a unit."""
    u = tl.load(direction + place, mask=there, other=0.0).to(tl.float32)
    return u, tl.rsqrt(tl.sum(u * u, axis=1) + EPS * EPS)


@triton.jit
def error_of(x, u, factor, target, ERASES: tl.constexpr):
    """What a channel lacks of its target along the unit, and what it has there."""
    component = factor * tl.sum(x * u, axis=1) if ERASES else tl.zeros_like(factor)
    return target - component, component


@triton.jit
def delta_forward(
    channels, results, direction, targets, beta, n_rows,
    WIDTH: tl.constexpr, LANES: tl.constexpr, EPS: tl.constexpr, ERASES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Moves the component of every channel towards its target."""
    rows, inside, place, there = row_tile(n_rows, tl.program_id(0), WIDTH, LANES, ROWS)
    u, factor = direction_of(direction, place, there, EPS)
    step = factor * tl.load(beta + rows, mask=inside, other=0.0).to(tl.float32)
    for c in tl.static_range(len(channels)):
        x = tl.load(channels[c] + place, mask=there, other=0.0).to(tl.float32)
        target = tl.load(targets + (tl.zeros_like(rows) + n_rows) * c + rows, mask=inside, other=0.0).to(tl.float32)
        error, _ = error_of(x, u, factor, target, ERASES)
        written = x + (step * error)[:, None] * u
        tl.store(results[c] + place, written.to(results[c].dtype.element_ty), mask=there)


@triton.jit
def delta_backward(
    channels, results, grads, direction, targets, beta, grad_direction, grad_targets, grad_beta, n_rows,
    WIDTH: tl.constexpr, LANES: tl.constexpr, EPS: tl.constexpr, ERASES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Gradients of all arguments, each of them of its own row."""
    rows, inside, place, there = row_tile(n_rows, tl.program_id(0), WIDTH, LANES, ROWS)
    u, factor = direction_of(direction, place, there, EPS)
    gate = tl.load(beta + rows, mask=inside, other=0.0).to(tl.float32)
    by_u = tl.zeros([ROWS, LANES], tl.float32)
    by_beta = tl.zeros([ROWS], tl.float32)
    by_factor = tl.zeros([ROWS], tl.float32)
    for c in tl.static_range(len(channels)):
        x = tl.load(channels[c] + place, mask=there, other=0.0).to(tl.float32)
        g = tl.load(grads[c] + place, mask=there, other=0.0).to(tl.float32)
        at = (tl.zeros_like(rows) + n_rows) * c + rows
        target = tl.load(targets + at, mask=inside, other=0.0).to(tl.float32)
        error, component = error_of(x, u, factor, target, ERASES)
        by_step = tl.sum(g * u, axis=1)
        by_target = by_step * gate * factor
        tl.store(grad_targets + at, by_target.to(grad_targets.dtype.element_ty), mask=inside)
        by_beta += by_step * factor * error
        by_factor += by_step * (error - component)
        by_u += (gate * factor * error)[:, None] * g
        if ERASES:
            along = (by_target * factor)[:, None]
            by_u -= along * x
            g -= along * u
        tl.store(results[c] + place, g.to(results[c].dtype.element_ty), mask=there)
    by_u -= (by_factor * gate * factor * factor * factor)[:, None] * u
    tl.store(grad_direction + place, by_u.to(grad_direction.dtype.element_ty), mask=there)
    tl.store(grad_beta + rows, by_beta.to(grad_beta.dtype.element_ty), mask=inside)
