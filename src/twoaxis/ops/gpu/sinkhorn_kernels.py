"""Sinkhorn normalisation in Triton: one matrix per thread, all rounds in registers, no exchange between threads.

Letters: N rows (tokens), n streams. A matrix is a tuple of its n n entries, [rows] each: source by source, and in it by
destination. Axis 0 is the source and axis 1 the destination, as in `ops.sinkhorn`. Logits and results are [n n N].
"""

import triton
import triton.language as tl


@triton.jit
def places(index, rows, n_rows):
    """The places of one number per row."""
    return (tl.zeros_like(rows) + n_rows) * index + rows


@triton.jit
def entries_of(matrices, rows, n_rows, SIZE: tl.constexpr):
    """All entries of the matrices of these rows."""
    found = ()
    for k in tl.static_range(SIZE * SIZE):
        found = found + (tl.load(matrices + places(k, rows, n_rows), mask=rows < n_rows, other=0.0).to(tl.float32),)
    return found


@triton.jit
def sums_of(matrix, SIZE: tl.constexpr, AXIS: tl.constexpr):
    """The sums over an axis."""
    found = ()
    for i in tl.static_range(SIZE):
        total = matrix[i if AXIS == 0 else i * SIZE]
        for k in tl.static_range(1, SIZE):
            total += matrix[k * SIZE + i if AXIS == 0 else i * SIZE + k]
        found = found + (total,)
    return found


@triton.jit
def maxima_of(matrix, SIZE: tl.constexpr, AXIS: tl.constexpr):
    """The largest entries along an axis."""
    found = ()
    for i in tl.static_range(SIZE):
        largest = matrix[i if AXIS == 0 else i * SIZE]
        for k in tl.static_range(1, SIZE):
            largest = tl.maximum(largest, matrix[k * SIZE + i if AXIS == 0 else i * SIZE + k])
        found = found + (largest,)
    return found


@triton.jit
def times(matrix, factors, SIZE: tl.constexpr, AXIS: tl.constexpr):
    """Every entry times the factor of its line along an axis."""
    found = ()
    for k in tl.static_range(SIZE * SIZE):
        found = found + (matrix[k] * factors[k % SIZE if AXIS == 0 else k // SIZE],)
    return found


@triton.jit
def divided(matrix, sums, half, rows, n_rows, SIZE: tl.constexpr, AXIS: tl.constexpr, EPS: tl.constexpr):
    """The matrix divided by its sums over an axis, which are kept where there is room for them."""
    totals = sums_of(matrix, SIZE, AXIS)
    inverse = ()
    for i in tl.static_range(SIZE):
        total = totals[i] + EPS
        if sums is not None:
            tl.store(sums + places(half * SIZE + i, rows, n_rows), total, mask=rows < n_rows)
        inverse = inverse + (1.0 / total,)
    return times(matrix, inverse, SIZE, AXIS)


@triton.jit
def start_of(logits, SIZE: tl.constexpr, FIRST: tl.constexpr, START: tl.constexpr):
    """The matrix before the rounds, without its eps."""
    largest = maxima_of(logits, SIZE, FIRST)
    found = ()
    for k in tl.static_range(SIZE * SIZE):
        shift = 0.0 if START == "exp" else largest[k % SIZE if FIRST == 0 else k // SIZE]
        found = found + (tl.exp(logits[k] - shift),)
    if START == "softmax":
        found = divided(found, None, 0, None, 0, SIZE, FIRST, 0.0)
    return found


@triton.jit
def rounds_of(
    logits, sums, rows, n_rows, SIZE: tl.constexpr, ROUNDS: tl.constexpr, FIRST: tl.constexpr, START: tl.constexpr,
    START_EPS: tl.constexpr, SUM_EPS: tl.constexpr,
):  # fmt: skip
    """The matrix after all rounds; a softmax is the first half of the first."""
    started = start_of(logits, SIZE, FIRST, START)
    matrix = ()
    for k in tl.static_range(SIZE * SIZE):
        matrix = matrix + (started[k] + START_EPS,)
    if START == "softmax":
        matrix = divided(matrix, sums, 1, rows, n_rows, SIZE, 1 - FIRST, SUM_EPS)
    for index in range(1 if START == "softmax" else 0, ROUNDS):
        matrix = divided(matrix, sums, 2 * index, rows, n_rows, SIZE, FIRST, SUM_EPS)
        matrix = divided(matrix, sums, 2 * index + 1, rows, n_rows, SIZE, 1 - FIRST, SUM_EPS)
    return matrix


@triton.jit
def sinkhorn_forward(
    logits, results, n_rows, SIZE: tl.constexpr, ROUNDS: tl.constexpr, FIRST: tl.constexpr, START: tl.constexpr,
    START_EPS: tl.constexpr, SUM_EPS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """All rounds of the matrices of some rows."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    given = entries_of(logits, rows, n_rows, SIZE)
    matrix = rounds_of(given, None, rows, n_rows, SIZE, ROUNDS, FIRST, START, START_EPS, SUM_EPS)
    for k in tl.static_range(SIZE * SIZE):
        tl.store(results + places(k, rows, n_rows), matrix[k], mask=rows < n_rows)


@triton.jit
def without_mean(grad, matrix, SIZE: tl.constexpr, AXIS: tl.constexpr):
    """The gradient by the logarithms of what was divided by its sums, from that by those of the quotients, `matrix`."""
    sums = sums_of(grad, SIZE, AXIS)
    found = ()
    for k in tl.static_range(SIZE * SIZE):
        found = found + (grad[k] - matrix[k] * sums[k % SIZE if AXIS == 0 else k // SIZE],)
    return found


@triton.jit
def undone(matrix, sums, half, rows, n_rows, SIZE: tl.constexpr, AXIS: tl.constexpr):
    """The matrix before it was divided by these sums. Each thread reads what it has written itself."""
    totals = ()
    for i in tl.static_range(SIZE):
        at = places(half * SIZE + i, rows, n_rows)
        totals = totals + (tl.load(sums + at, mask=rows < n_rows, other=1.0),)
    return times(matrix, totals, SIZE, AXIS)


@triton.jit
def without_shift(grad, logits, SIZE: tl.constexpr, AXIS: tl.constexpr):
    """The gradient less that of the maximum along an axis, which equal entries share."""
    largest = maxima_of(logits, SIZE, AXIS)
    chosen = ()
    for k in tl.static_range(SIZE * SIZE):
        chosen = chosen + (tl.where(logits[k] < largest[k % SIZE if AXIS == 0 else k // SIZE], 0.0, 1.0),)
    counts, sums = sums_of(chosen, SIZE, AXIS), sums_of(grad, SIZE, AXIS)
    shares = ()
    for i in tl.static_range(SIZE):
        shares = shares + (sums[i] / counts[i],)
    moved = times(chosen, shares, SIZE, AXIS)
    found = ()
    for k in tl.static_range(SIZE * SIZE):
        found = found + (grad[k] - moved[k],)
    return found


@triton.jit
def sinkhorn_backward(
    grad, logits, sums, results, n_rows, SIZE: tl.constexpr, ROUNDS: tl.constexpr, FIRST: tl.constexpr,
    START: tl.constexpr, START_EPS: tl.constexpr, SUM_EPS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Runs the rounds again and keeps their sums, then undoes each division by multiplying with them."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    given = entries_of(logits, rows, n_rows, SIZE)
    matrix = rounds_of(given, sums, rows, n_rows, SIZE, ROUNDS, FIRST, START, START_EPS, SUM_EPS)
    arrived = entries_of(grad, rows, n_rows, SIZE)
    by_log = ()
    for k in tl.static_range(SIZE * SIZE):
        by_log = by_log + (arrived[k] * matrix[k],)
    for back in range(1 if START == "softmax" else 0, ROUNDS):
        last = 2 * (ROUNDS - 1 - back + (1 if START == "softmax" else 0)) + 1
        by_log = without_mean(by_log, matrix, SIZE, 1 - FIRST)
        matrix = undone(matrix, sums, last, rows, n_rows, SIZE, 1 - FIRST)
        by_log = without_mean(by_log, matrix, SIZE, FIRST)
        matrix = undone(matrix, sums, last - 1, rows, n_rows, SIZE, FIRST)
    if START == "softmax":
        by_log = without_mean(by_log, matrix, SIZE, 1 - FIRST)
    # Loaded again rather than held in registers during the rounds.
    given = entries_of(logits, rows, n_rows, SIZE)
    if START_EPS > 0 or START == "softmax":
        started = start_of(given, SIZE, FIRST, START)
    if START_EPS > 0:
        scaled = ()
        for k in tl.static_range(SIZE * SIZE):
            scaled = scaled + (by_log[k] * (started[k] / (started[k] + START_EPS)),)
        by_log = scaled
    if START == "softmax":
        by_log = without_mean(by_log, started, SIZE, FIRST)
    if START == "exp_minus_max" and START_EPS + SUM_EPS > 0:
        # Without an eps the first sum cancels the shift.
        by_log = without_shift(by_log, given, SIZE, FIRST)
    for k in tl.static_range(SIZE * SIZE):
        tl.store(results + places(k, rows, n_rows), by_log[k].to(results.dtype.element_ty), mask=rows < n_rows)
