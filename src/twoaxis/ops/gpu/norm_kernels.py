"""Norms of rows in Triton: the inverse rms of a source, and the gradient that flows through it.

Letters: N rows, D width. A tile is [rows, lanes], the width padded to a power of two. Loads are converted to float32 at once.
"""

import triton
import triton.language as tl


@triton.jit
def row_tile(n_rows, block, WIDTH: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr):
    """The rows of a block, which of them exist, and the places of their numbers, [rows, lanes], with those that exist."""
    rows = block.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, LANES)[None, :]
    here = rows < n_rows
    return rows, here, (rows * WIDTH)[:, None] + lane, here[:, None] & (lane < WIDTH)


@triton.jit
def inverse_rms_forward(
    x, factors, eps, n_rows, WIDTH: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Stores 1 / sqrt(mean(x^2) + eps) of each row."""
    rows, here, place, there = row_tile(n_rows, tl.program_id(0), WIDTH, LANES, ROWS)
    wide = tl.load(x + place, mask=there, other=0.0).to(tl.float32)
    tl.store(factors + rows, 1.0 / tl.sqrt(tl.sum(wide * wide, axis=1) / WIDTH + eps), mask=here)


@triton.jit
def inverse_rms_backward(
    x, factors, by_factor, passed, results, n_rows, WIDTH: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Stores the gradient through the factors, with the gradient of later readers where one arrives."""
    rows, here, place, there = row_tile(n_rows, tl.program_id(0), WIDTH, LANES, ROWS)
    r = tl.load(factors + rows, mask=here, other=0.0)
    along = tl.load(by_factor + rows, mask=here, other=0.0) * r * r * r / -WIDTH
    grad = along[:, None] * tl.load(x + place, mask=there, other=0.0).to(tl.float32)
    if passed is not None:
        grad += tl.load(passed + place, mask=there, other=0.0).to(tl.float32)
    tl.store(results + place, grad.to(results.dtype.element_ty), mask=there)
