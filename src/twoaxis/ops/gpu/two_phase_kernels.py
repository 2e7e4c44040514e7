"""Phase 1 of the two-phase schedule in Triton: several queries read the same sources in one sweep forward, two backward.

Letters and tiles are those of `depth_read_kernels`, for each of Q queries: what belongs to a query is an entry of a tuple, as
one more axis of the tiles would bring copies through shared memory. Small tensors are [Q S N H] and [Q N H] in float32.
"""

import triton
import triton.language as tl

from twoaxis.ops.gpu.depth_read_kernels import (
    absorb,
    columns_of,
    hand_back,
    head_cells,
    load_cells,
    query_of,
    row_cells,
    small_cells,
    weights_of,
)


@triton.jit
def queries_of(queries, rows, n_rows, columns, real, WIDTH: tl.constexpr, QUERIES: tl.constexpr):
    """Every query, as [1, heads, lanes]."""
    found = ()
    for k in tl.static_range(QUERIES):
        found = found + (query_of(queries + k * WIDTH, rows, n_rows, columns, real, WIDTH, False),)
    return found


@triton.jit
def zeros_each(QUERIES: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr, LANES: tl.constexpr):
    """A tile of zeros for every query."""
    found = ()
    for _ in tl.static_range(QUERIES):
        found = found + (tl.zeros([ROWS, SLOTS, LANES], tl.float32),)
    return found


@triton.jit(do_not_specialize=["n_sources"])
def early_read_forward(
    sources, factors, queries, mixtures, scores, log_totals, n_sources, n_rows,
    WIDTH: tl.constexpr, HEADS: tl.constexpr, SLOTS: tl.constexpr, LANES: tl.constexpr, QUERIES: tl.constexpr,
    ROWS: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Softmax over the sources as they come, for every query; stores mixtures, products, and the logs of the sums."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns, real = columns_of(WIDTH, HEADS, SLOTS, LANES)
    q = queries_of(queries, rows, n_rows, columns, real, WIDTH, QUERIES)
    mixed, tops, totals = zeros_each(QUERIES, ROWS, SLOTS, LANES), (), ()
    for _ in tl.static_range(QUERIES):
        tops = tops + (tl.full([ROWS, SLOTS], float("-inf"), tl.float32),)
        totals = totals + (tl.zeros([ROWS, SLOTS], tl.float32),)
    # Of one query in the small tensors.
    step = (tl.zeros([], tl.int64) + n_sources) * n_rows * HEADS
    for start in tl.range(0, n_sources, GROUP, num_stages=STAGES):
        index = start + tl.arange(0, GROUP)
        small, seen, small_heads, seen_heads = small_cells(index, rows, n_sources, n_rows, HEADS, SLOTS)
        v = load_cells(sources, index, rows, columns, seen[:, :, None, None] & real[None, None], WIDTH)
        r = tl.load(factors + small, mask=seen, other=0.0)[:, :, None]
        new_mixed, new_tops, new_totals = (), (), ()
        for k in tl.static_range(QUERIES):
            raw = tl.sum(v * q[k][:, None], axis=3)
            tl.store(scores + k * step + small_heads, raw, mask=seen_heads)
            logit = tl.where((index < n_sources)[None, :, None], raw * r, float("-inf"))
            top, total, mixture = absorb(logit, 1.0, v, tops[k], totals[k], mixed[k])
            new_mixed, new_tops, new_totals = new_mixed + (mixture,), new_tops + (top,), new_totals + (total,)
        mixed, tops, totals = new_mixed, new_tops, new_totals
    place, there = row_cells(rows, n_rows, columns, real, WIDTH)
    at_heads, head_there = head_cells(rows, n_rows, HEADS, SLOTS)
    for k in tl.static_range(QUERIES):
        tl.store(mixtures[k] + place, mixed[k] / totals[k][:, :, None], mask=there)
        totals_k = log_totals + k * n_rows * HEADS
        tl.store(totals_k + at_heads, tops[k] + tl.log(totals[k]), mask=head_there)


@triton.jit
def lost_means(
    sources, factors, scores, step, log_totals, grads, grad_totals, n_sources, n_rows, rows, columns, real,
    WIDTH: tl.constexpr, HEADS: tl.constexpr, SLOTS: tl.constexpr, LANES: tl.constexpr, QUERIES: tl.constexpr,
    ROWS: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """For every query the mean of the gradients of its weights, less the gradient of its log total: [rows, heads]."""
    mixed = zeros_each(QUERIES, ROWS, SLOTS, LANES)
    for start in tl.range(0, n_sources, GROUP, num_stages=STAGES):
        index = start + tl.arange(0, GROUP)
        small, seen, small_heads, seen_heads = small_cells(index, rows, n_sources, n_rows, HEADS, SLOTS)
        v = load_cells(sources, index, rows, columns, seen[:, :, None, None] & real[None, None], WIDTH)
        new = ()
        for k in tl.static_range(QUERIES):
            _, _, weight = weights_of(scores + k * step, factors, log_totals[k], small, seen, small_heads, seen_heads)
            new = new + (mixed[k] + tl.sum(weight[:, :, :, None] * v, axis=1),)
        mixed = new
    at_heads, head_there = head_cells(rows, n_rows, HEADS, SLOTS)
    found = ()
    for k in tl.static_range(QUERIES):
        by_total = tl.load(grad_totals[k] + at_heads, mask=head_there, other=0.0)
        found = found + (tl.sum(grads[k] * mixed[k], axis=2) - by_total,)
    return found


@triton.jit(do_not_specialize=["n_sources", "wanted", "given"])
def early_read_backward(
    sources, results, passed, factors, queries, grads, grad_totals, scores, log_totals, grad_queries, grad_factors,
    n_sources, wanted, given, n_rows,
    WIDTH: tl.constexpr, HEADS: tl.constexpr, SLOTS: tl.constexpr, LANES: tl.constexpr, QUERIES: tl.constexpr,
    ROWS: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of all arguments. A program takes every so-many-th block of rows and sums over its own rows in order."""
    columns, real = columns_of(WIDTH, HEADS, SLOTS, LANES)
    total_queries = zeros_each(QUERIES, ROWS, SLOTS, LANES)
    step = (tl.zeros([], tl.int64) + n_sources) * n_rows * HEADS
    for block in range(tl.program_id(0), tl.cdiv(n_rows, ROWS), tl.num_programs(0)):
        rows = tl.zeros([ROWS], tl.int64) + block * ROWS + tl.arange(0, ROWS)
        q = queries_of(queries, rows, n_rows, columns, real, WIDTH, QUERIES)
        place, there = row_cells(rows, n_rows, columns, real, WIDTH)
        at_heads, head_there = head_cells(rows, n_rows, HEADS, SLOTS)
        g, totals = (), ()
        for k in tl.static_range(QUERIES):
            g = g + (tl.load(grads[k] + place, mask=there, other=0.0).to(tl.float32),)
            totals = totals + (tl.load(log_totals + k * n_rows * HEADS + at_heads, mask=head_there, other=0.0),)
        lost = lost_means(
            sources, factors, scores, step, totals, g, grad_totals, n_sources, n_rows, rows, columns, real,
            WIDTH, HEADS, SLOTS, LANES, QUERIES, ROWS, GROUP, STAGES,
        )  # fmt: skip
        for start in tl.range(0, n_sources, GROUP, num_stages=STAGES):
            index = start + tl.arange(0, GROUP)
            small, seen, small_heads, seen_heads = small_cells(index, rows, n_sources, n_rows, HEADS, SLOTS)
            v = load_cells(sources, index, rows, columns, seen[:, :, None, None] & real[None, None], WIDTH)
            grad_v = tl.zeros([ROWS, GROUP, SLOTS, LANES], tl.float32)
            by_factor = tl.zeros([ROWS, GROUP], tl.float32)
            new = ()
            for k in tl.static_range(QUERIES):
                raw, r, weight = weights_of(scores + k * step, factors, totals[k], small, seen, small_heads, seen_heads)
                by_logit = weight * (tl.sum(v * g[k][:, None], axis=3) - lost[k][:, None])
                by_factor += tl.sum(by_logit * raw, axis=2)
                by_score = (by_logit * r[:, :, None])[:, :, :, None]
                new = new + (total_queries[k] + tl.sum(by_score * v, axis=1),)
                grad_v += weight[:, :, :, None] * g[k][:, None] + by_score * q[k][:, None]
            total_queries = new
            r = tl.load(factors + small, mask=seen, other=0.0)
            hand_back(
                grad_v, by_factor, v, r, results, passed, grad_factors, wanted, given,
                index, small, seen, rows, columns, real, WIDTH,
            )  # fmt: skip
    for k in tl.static_range(QUERIES):
        own = (tl.program_id(0) * QUERIES + k) * WIDTH
        tl.store(grad_queries + own + columns, tl.sum(total_queries[k], axis=0), mask=real)
