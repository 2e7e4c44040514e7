"""The depth read in Triton: one sweep over the sources forward, two backward, whatever their number.

Letters: N rows, D width, H heads, S depth sources. A tile is [rows, group, heads, lanes]: `GROUP` sources of `ROWS` rows, whose
heads and their width are padded to powers of two. Sources are a padded tuple of tensors; a loop picks the addresses of a group
at run time, so that neither registers nor the time to compile grow with S. Every load is converted to float32 at once. Small
tensors are [S N] and [S N H] in float32.
"""

import triton
import triton.language as tl


@triton.jit
def pick(tensors, index):
    """The addresses of tensors[index]: a tuple can only be indexed by constants."""
    found = tensors[0] + tl.zeros_like(index)
    for k in tl.static_range(1, len(tensors)):
        found = tl.where(index == k, tensors[k], found)
    return found


@triton.jit
def cells(tensors, index, rows, columns, WIDTH: tl.constexpr):
    """The addresses of these sources, rows and columns: [rows, group, heads, lanes]."""
    starts = pick(tensors, index)[None, :] + (rows * WIDTH)[:, None]
    return starts[:, :, None, None] + columns[None, None]


@triton.jit
def load_cells(tensors, index, rows, columns, there, WIDTH: tl.constexpr):
    """Loads these cells in float32, 0 where nothing is."""
    return tl.load(cells(tensors, index, rows, columns, WIDTH), mask=there, other=0.0).to(tl.float32)


@triton.jit
def columns_of(WIDTH: tl.constexpr, HEADS: tl.constexpr, SLOTS: tl.constexpr, LANES: tl.constexpr):
    """The columns of a row by head, [heads, lanes], and which of them exist."""
    head, lane = tl.arange(0, SLOTS)[:, None], tl.arange(0, LANES)[None, :]
    return head * (WIDTH // HEADS) + lane, (head < HEADS) & (lane < WIDTH // HEADS)


@triton.jit
def small_cells(index, rows, n_sources, n_rows, HEADS: tl.constexpr, SLOTS: tl.constexpr):
    """The places of a number per source and row, [rows, group], and of one per head, [rows, group, heads]; which exist."""
    place = index[None, :].to(tl.int64) * n_rows + rows[:, None]
    there = (index < n_sources)[None, :] & (rows < n_rows)[:, None]
    head = tl.arange(0, SLOTS)[None, None, :]
    return place, there, place[:, :, None] * HEADS + head, there[:, :, None] & (head < HEADS)


@triton.jit
def row_cells(rows, n_rows, columns, real, WIDTH: tl.constexpr):
    """The places of whole rows, [rows, heads, lanes], and which of them exist."""
    return (rows * WIDTH)[:, None, None] + columns[None], (rows < n_rows)[:, None, None] & real[None]


@triton.jit
def head_cells(rows, n_rows, HEADS: tl.constexpr, SLOTS: tl.constexpr):
    """The places of a number per row and head, [rows, heads], and which of them exist."""
    head = tl.arange(0, SLOTS)[None, :]
    return rows[:, None] * HEADS + head, (rows < n_rows)[:, None] & (head < HEADS)


@triton.jit
def query_of(query, rows, n_rows, columns, real, WIDTH: tl.constexpr, QUERY_EACH: tl.constexpr):
    """The query of each row, or the one of all: [rows or 1, heads, lanes]."""
    if QUERY_EACH:
        place, there = row_cells(rows, n_rows, columns, real, WIDTH)
        return tl.load(query + place, mask=there, other=0.0).to(tl.float32)
    return tl.load(query + columns, mask=real, other=0.0).to(tl.float32)[None]


@triton.jit
def chosen(bits, index):
    """Which of these positions are in a set."""
    return (((tl.zeros_like(index).to(tl.int64) + bits) >> index) & 1) == 1


@triton.jit
def weights_of(scores, factors, log_total, small, seen, small_heads, seen_heads):
    """The products, the factors and the softmax weights of a group, as the forward pass had them; 0 where nothing is."""
    raw = tl.load(scores + small_heads, mask=seen_heads, other=0.0)
    r = tl.load(factors + small, mask=seen, other=0.0)
    return raw, r, tl.where(seen_heads, tl.exp(raw * r[:, :, None] - log_total[:, None]), 0.0)


@triton.jit
def absorb(logit, each, v, top, total, mixture):
    """Takes one group into a softmax that runs: the highest logit, the sum of weights, and the sum of weighted sources."""
    highest = tl.maximum(top, tl.max(logit, axis=1))
    weight = tl.exp(logit - highest[:, None, :])
    shrink = tl.exp(top - highest)
    mixture = mixture * shrink[:, :, None] + tl.sum((weight * each)[:, :, :, None] * v, axis=1)
    return highest, total * shrink + tl.sum(weight, axis=1), mixture


@triton.jit(do_not_specialize=["n_sources"])
def depth_read_forward(
    sources, factors, query, early_mixture, early_total, stream, scale, mixed, scores, log_totals, n_sources, n_rows,
    WIDTH: tl.constexpr, HEADS: tl.constexpr, SLOTS: tl.constexpr, LANES: tl.constexpr, QUERY_EACH: tl.constexpr,
    NORMALISED: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Softmax over the sources as they come; stores the mixture, the products before their factor, and the log of the sum.

    It may go on from an early read: the mixture of other sources and the log of the sum of their weights.
    """
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns, real = columns_of(WIDTH, HEADS, SLOTS, LANES)
    q = query_of(query, rows, n_rows, columns, real, WIDTH, QUERY_EACH)
    place, there = row_cells(rows, n_rows, columns, real, WIDTH)
    at_heads, head_there = head_cells(rows, n_rows, HEADS, SLOTS)
    if early_mixture is None:
        top = tl.full([ROWS, SLOTS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS, SLOTS], tl.float32)
        mixture = tl.zeros([ROWS, SLOTS, LANES], tl.float32)
    else:
        top = tl.load(early_total + at_heads, mask=head_there, other=0.0)
        total = tl.full([ROWS, SLOTS], 1.0, tl.float32)
        mixture = tl.load(early_mixture + place, mask=there, other=0.0).to(tl.float32)
    for start in tl.range(0, n_sources, GROUP, num_stages=STAGES):
        index = start + tl.arange(0, GROUP)
        small, seen, small_heads, seen_heads = small_cells(index, rows, n_sources, n_rows, HEADS, SLOTS)
        seen_cells = seen[:, :, None, None] & real[None, None]
        v = load_cells(sources, index, rows, columns, seen_cells, WIDTH)
        r = tl.load(factors + small, mask=seen, other=0.0)[:, :, None]
        raw = tl.sum(v * q[:, None], axis=3)
        tl.store(scores + small_heads, raw, mask=seen_heads)
        logit = tl.where((index < n_sources)[None, :, None], raw * r, float("-inf"))
        top, total, mixture = absorb(logit, r if NORMALISED else 1.0, v, top, total, mixture)
    mixture = mixture / total[:, :, None]
    if scale is not None:
        mixture = mixture * tl.load(scale).to(tl.float32)
    if stream is not None:
        mixture += tl.load(stream + place, mask=there, other=0.0).to(tl.float32)
    tl.store(mixed + place, mixture.to(mixed.dtype.element_ty), mask=there)
    tl.store(log_totals + at_heads, top + tl.log(total), mask=head_there)


@triton.jit
def mixture_of(
    sources, factors, scores, log_total, n_sources, n_rows, rows, columns, real,
    WIDTH: tl.constexpr, HEADS: tl.constexpr, NORMALISED: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The mixture once more, which was saved nowhere: in 16 bits it would cost the gradients their precision."""
    mixture = tl.zeros([ROWS, real.shape[0], real.shape[1]], tl.float32)
    for start in tl.range(0, n_sources, GROUP, num_stages=STAGES):
        index = start + tl.arange(0, GROUP)
        small, seen, small_heads, seen_heads = small_cells(index, rows, n_sources, n_rows, HEADS, real.shape[0])
        seen_cells = seen[:, :, None, None] & real[None, None]
        v = load_cells(sources, index, rows, columns, seen_cells, WIDTH)
        _, r, weight = weights_of(scores, factors, log_total, small, seen, small_heads, seen_heads)
        weight = weight * r[:, :, None] if NORMALISED else weight
        mixture += tl.sum(weight[:, :, :, None] * v, axis=1)
    return mixture


@triton.jit
def hand_back(
    grad_v, by_factor, v, r, results, passed, grad_factors, wanted, given, index, small, seen, rows, columns, real,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Stores the gradients of a group, also of its factors or through them, and those of later readers with them."""
    if grad_factors is None:
        grad_v -= (by_factor * r * r * r / WIDTH)[:, :, None, None] * v
    else:
        tl.store(grad_factors + small, by_factor, mask=seen)
    cells_there = seen[:, :, None, None] & real[None, None]
    if passed is not None:
        grad_v += load_cells(passed, index, rows, columns, cells_there & chosen(given, index)[None, :, None, None], WIDTH)
    asked = cells_there & chosen(wanted, index)[None, :, None, None]
    tl.store(cells(results, index, rows, columns, WIDTH), grad_v.to(results[0].dtype.element_ty), mask=asked)


@triton.jit(do_not_specialize=["n_sources", "wanted", "given"])
def depth_read_backward(
    sources, results, passed, factors, query, early_mixture, early_total, scale, grad, scores, log_totals,
    grad_query, grad_factors, grad_scale, grad_mixture, grad_total, n_sources, wanted, given, n_rows,
    WIDTH: tl.constexpr, HEADS: tl.constexpr, SLOTS: tl.constexpr, LANES: tl.constexpr, QUERY_EACH: tl.constexpr,
    NORMALISED: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of all arguments. A program takes every so-many-th block of rows and sums over its own rows in order."""
    columns, real = columns_of(WIDTH, HEADS, SLOTS, LANES)
    total_query = tl.zeros([ROWS, SLOTS, LANES], tl.float32)
    total_scale = tl.zeros([ROWS, SLOTS], tl.float32)
    factor = 1.0 if scale is None else tl.load(scale).to(tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(n_rows, ROWS), tl.num_programs(0)):
        rows = tl.zeros([ROWS], tl.int64) + block * ROWS + tl.arange(0, ROWS)
        place, there = row_cells(rows, n_rows, columns, real, WIDTH)
        q = query_of(query, rows, n_rows, columns, real, WIDTH, QUERY_EACH)
        g = tl.load(grad + place, mask=there, other=0.0).to(tl.float32)
        at_heads, head_there = head_cells(rows, n_rows, HEADS, SLOTS)
        log_total = tl.load(log_totals + at_heads, mask=head_there, other=0.0)
        mixture = mixture_of(
            sources, factors, scores, log_total, n_sources, n_rows, rows, columns, real,
            WIDTH, HEADS, NORMALISED, ROWS, GROUP, STAGES,
        )  # fmt: skip
        if early_mixture is not None:
            early = tl.load(early_mixture + place, mask=there, other=0.0).to(tl.float32)
            early_weight = tl.exp(tl.load(early_total + at_heads, mask=head_there, other=0.0) - log_total)
            mixture += early_weight[:, :, None] * early
        # The mean of the gradients of the weights.
        mean = tl.sum(g * mixture, axis=2)
        total_scale += mean
        g = g * factor
        if early_mixture is not None:
            by_total = early_weight * (tl.sum(g * early, axis=2) - factor * mean)
            tl.store(grad_total + at_heads, by_total, mask=head_there)
            tl.store(grad_mixture + place, (early_weight[:, :, None] * g).to(grad_mixture.dtype.element_ty), mask=there)
        if QUERY_EACH:
            total_query = tl.zeros([ROWS, SLOTS, LANES], tl.float32)
        for start in tl.range(0, n_sources, GROUP, num_stages=STAGES):
            index = start + tl.arange(0, GROUP)
            small, seen, small_heads, seen_heads = small_cells(index, rows, n_sources, n_rows, HEADS, SLOTS)
            v = load_cells(sources, index, rows, columns, seen[:, :, None, None] & real[None, None], WIDTH)
            raw, r, weight = weights_of(scores, factors, log_total, small, seen, small_heads, seen_heads)
            by_weight = tl.sum(v * g[:, None], axis=3)
            each = r[:, :, None] if NORMALISED else 1.0
            by_logit = weight * (by_weight * each - factor * mean[:, None])
            by_factor = tl.sum(by_logit * raw + (weight * by_weight if NORMALISED else 0.0), axis=2)
            by_score = (by_logit * r[:, :, None])[:, :, :, None]
            total_query += tl.sum(by_score * v, axis=1)
            grad_v = (weight * each)[:, :, :, None] * g[:, None] + by_score * q[:, None]
            hand_back(
                grad_v, by_factor, v, r, results, passed, grad_factors, wanted, given,
                index, small, seen, rows, columns, real, WIDTH,
            )  # fmt: skip
        if QUERY_EACH:
            tl.store(grad_query + place, total_query.to(grad_query.dtype.element_ty), mask=there)
    if not QUERY_EACH:
        tl.store(grad_query + tl.program_id(0) * WIDTH + columns, tl.sum(total_query, axis=0), mask=real)
    if grad_scale is not None:
        tl.store(grad_scale + tl.program_id(0), tl.sum(tl.sum(total_scale, axis=1), axis=0))
