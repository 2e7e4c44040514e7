"""Mixing of parallel streams in Triton: every source and every result moves once in each direction.

Letters: N rows, D width, n sources, K results. A tile is [rows, columns]: `ROWS` rows and `COLUMNS` of their columns. Sources
and results are tuples of tensors of exact length, and loops over them are unrolled. Every load is converted to float32 at once.
Weights are [n K], or one per row, [n K N]; those of the update are [K] or [K N].
"""

import triton
import triton.language as tl


@triton.jit
def weights_of(weights, COUNT: tl.constexpr, EACH: tl.constexpr, rows, n_rows):
    """All weights of these rows as a tuple of columns, [rows, 1]; an empty one where there are none."""
    found = ()
    if weights is not None:
        for k in tl.static_range(COUNT):
            if EACH:
                one = tl.load(weights + (tl.zeros_like(rows) + n_rows) * k + rows, mask=rows < n_rows, other=0.0)
            else:
                one = tl.load(weights + k + tl.zeros_like(rows))
            found = found + (one.to(tl.float32)[:, None],)
    return found


@triton.jit
def load_all(tensors, place, there):
    """These cells of all tensors."""
    found = ()
    for k in tl.static_range(len(tensors)):
        found = found + (tl.load(tensors[k] + place, mask=there, other=0.0).to(tl.float32),)
    return found


@triton.jit
def zeros(COUNT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A tuple of sums that begin."""
    found = ()
    for _ in tl.static_range(COUNT):
        found = found + (tl.zeros([ROWS, COLUMNS], tl.float32),)
    return found


@triton.jit
def with_products(sums, sources, grads, place, there):
    """The sums with the product of every source and every gradient added."""
    found = ()
    for j in tl.static_range(len(sources)):
        x = tl.load(sources[j] + place, mask=there, other=0.0).to(tl.float32)
        for i in tl.static_range(len(grads)):
            found = found + (sums[j * len(grads) + i] + x * grads[i],)
    return found


@triton.jit
def store_sums(sums, result, EACH: tl.constexpr, rows, n_rows):
    """Stores the sums over columns, for every row, or over the rows of this program."""
    for k in tl.static_range(len(sums)):
        by_row = tl.sum(sums[k], axis=1)
        if EACH:
            place = result + (tl.zeros_like(rows) + n_rows) * k + rows
            tl.store(place, by_row.to(result.dtype.element_ty), mask=rows < n_rows)
        else:
            tl.store(result + tl.program_id(0) * len(sums) + k, tl.sum(by_row, axis=0))


@triton.jit
def mix_forward(
    sources, update, residual, write, results, n_rows,
    WIDTH: tl.constexpr, RESIDUAL_EACH: tl.constexpr, WRITE_EACH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Every result is a weighted sum of all sources, or without weights its own source, and of the update."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mixing = weights_of(residual, len(sources) * len(results), RESIDUAL_EACH, rows, n_rows)
    writing = weights_of(write, len(results), WRITE_EACH, rows, n_rows)
    for start in range(0, WIDTH, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)[None, :]
        place, there = rows[:, None] * WIDTH + columns, (rows < n_rows)[:, None] & (columns < WIDTH)
        xs = load_all(sources, place, there)
        if update is not None:
            y = tl.load(update + place, mask=there, other=0.0).to(tl.float32)
        for i in tl.static_range(len(results)):
            if residual is None:
                total = xs[i]
            else:
                total = mixing[i] * xs[0]
                for j in tl.static_range(1, len(sources)):
                    total += mixing[j * len(results) + i] * xs[j]
            if update is not None:
                total += writing[i] * y
            tl.store(results[i] + place, total.to(results[i].dtype.element_ty), mask=there)


@triton.jit
def mix_backward(
    sources, update, residual, write, grads, results, grad_update, grad_residual, grad_write, n_rows,
    WIDTH: tl.constexpr, RESIDUAL_EACH: tl.constexpr, WRITE_EACH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Gradients of all arguments. A program takes every so-many-th block of rows and sums over its own rows in order."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    by_residual = zeros(0 if grad_residual is None else len(sources) * len(grads), ROWS, COLUMNS)
    by_write = zeros(0 if grad_write is None else len(grads), ROWS, COLUMNS)
    for block in range(tl.program_id(0), tl.cdiv(n_rows, ROWS), tl.num_programs(0)):
        rows = tl.zeros([ROWS], tl.int64) + block * ROWS + tl.arange(0, ROWS)
        mixing = weights_of(residual, len(sources) * len(grads), RESIDUAL_EACH, rows, n_rows)
        writing = weights_of(write, len(grads), WRITE_EACH, rows, n_rows)
        if RESIDUAL_EACH:
            by_residual = zeros(len(by_residual), ROWS, COLUMNS)
        if WRITE_EACH:
            by_write = zeros(len(by_write), ROWS, COLUMNS)
        for start in range(0, WIDTH, COLUMNS):
            columns = start + tl.arange(0, COLUMNS)[None, :]
            place, there = rows[:, None] * WIDTH + columns, (rows < n_rows)[:, None] & (columns < WIDTH)
            gs = load_all(grads, place, there)
            if grad_residual is not None:
                by_residual = with_products(by_residual, sources, gs, place, there)
            if grad_write is not None:
                by_write = with_products(by_write, (update,), gs, place, there)
            if residual is not None:
                for j in tl.static_range(len(sources)):
                    total = mixing[j * len(grads)] * gs[0]
                    for i in tl.static_range(1, len(grads)):
                        total += mixing[j * len(grads) + i] * gs[i]
                    tl.store(results[j] + place, total.to(results[j].dtype.element_ty), mask=there)
            if update is not None:
                total = writing[0] * gs[0]
                for i in tl.static_range(1, len(grads)):
                    total += writing[i] * gs[i]
                tl.store(grad_update + place, total.to(grad_update.dtype.element_ty), mask=there)
        if RESIDUAL_EACH:
            store_sums(by_residual, grad_residual, True, rows, n_rows)
        if WRITE_EACH:
            store_sums(by_write, grad_write, True, rows, n_rows)
    if not RESIDUAL_EACH:
        store_sums(by_residual, grad_residual, False, rows, n_rows)
    if not WRITE_EACH:
        store_sums(by_write, grad_write, False, rows, n_rows)
