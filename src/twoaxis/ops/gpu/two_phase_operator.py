"""Phase 1 of the two-phase schedule on a GPU: its operators in torch's library, and their gradient.

Letters: N rows (tokens), D width, H heads, S depth sources, Q queries.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from twoaxis.ops import kernels
from twoaxis.ops.gpu import launch
from twoaxis.ops.gpu.depth_read_operator import shapes
from twoaxis.ops.precision import refuse_second_gradients


def _fake_early(
    queries: Tensor, sources: Sequence[Tensor], factors: Tensor, n_heads: int
) -> tuple[list[Tensor], Tensor, Tensor]:
    shape, Q = sources[0].shape, len(queries)
    # Separate tensors: each lives as long as its own reader needs it.
    mixtures = [torch.empty(shape, dtype=torch.float32, device=factors.device) for _ in range(Q)]
    scores = torch.empty(Q, len(sources), *shape[:-1], n_heads, dtype=torch.float32, device=factors.device)
    return mixtures, scores, torch.empty(Q, *shape[:-1], n_heads, dtype=torch.float32, device=factors.device)


@kernels.operator(
    "early_read(Tensor queries, Tensor[] sources, Tensor factors, int n_heads) -> (Tensor[], Tensor, Tensor)", _fake_early
)
def _early(queries: Tensor, sources: Sequence[Tensor], factors: Tensor, n_heads: int) -> tuple[list[Tensor], Tensor, Tensor]:
    mixtures, scores, log_totals = results = _fake_early(queries, sources, factors, n_heads)
    constants, n_rows = shapes(sources, n_heads)
    if n_rows == 0:
        return results
    from twoaxis.ops.gpu.two_phase_kernels import early_read_forward

    blocks = launch.early_blocks(constants["SLOTS"] * constants["LANES"], len(sources), sources[0].element_size())
    rows = [kernels.ready(v) for v in sources]
    queries, factors = kernels.ready(queries), kernels.ready(factors)
    for some in _spans(len(queries), blocks.queries):
        launch.start(
            early_read_forward,
            blocks,
            n_rows,
            launch.padded(rows, rows[0]),
            factors,
            queries[some],
            tuple(mixtures[some]),
            scores[some],
            log_totals[some],
            len(sources),
            QUERIES=some.stop - some.start,
            **constants,
        )
    return results


def _spans(n: int, most: int) -> list[slice]:
    """Slices of at most so many queries."""
    return [slice(start, min(start + most, n)) for start in range(0, n, most)]


def _fake_backward(
    grads: Sequence[Tensor],
    grad_totals: Tensor,
    queries: Tensor,
    sources: Sequence[Tensor],
    factors: Tensor,
    scores: Tensor,
    log_totals: Tensor,
    passed: Sequence[Tensor],
    given: int,
    wanted: int,
    own: bool,
    n_heads: int,
) -> tuple[list[Tensor], Tensor, Tensor]:
    like = [v for index, v in enumerate(sources) if wanted >> index & 1]
    results = [kernels.empty(v) for v in like]
    grad_factors = torch.empty(factors.shape if own else (0,), dtype=factors.dtype, device=factors.device)
    return results, torch.empty_like(queries), grad_factors


@kernels.operator(
    "early_read_backward(Tensor[] grads, Tensor grad_totals, Tensor queries, Tensor[] sources, Tensor factors, Tensor scores, "
    "Tensor log_totals, Tensor[] passed, int given, int wanted, bool own, int n_heads) -> (Tensor[], Tensor, Tensor)",
    _fake_backward,
)
def _early_backward(
    grads: Sequence[Tensor],
    grad_totals: Tensor,
    queries: Tensor,
    sources: Sequence[Tensor],
    factors: Tensor,
    scores: Tensor,
    log_totals: Tensor,
    passed: Sequence[Tensor],
    given: int,
    wanted: int,
    own: bool,
    n_heads: int,
) -> tuple[list[Tensor], Tensor, Tensor]:
    sets = given, wanted, own, n_heads
    found = _fake_backward(grads, grad_totals, queries, sources, factors, scores, log_totals, passed, *sets)
    results, grad_queries, grad_factors = found
    constants, n_rows = shapes(sources, n_heads)
    if n_rows == 0:
        return results, grad_queries.zero_(), grad_factors
    from twoaxis.ops.gpu.two_phase_kernels import early_read_backward

    blocks = launch.early_backward_blocks(constants["SLOTS"] * constants["LANES"], len(sources), sources[0].element_size())
    programs = launch.n_programs(blocks, n_rows)
    rows = [kernels.ready(v) for v in sources]
    queries, factors, grad_totals = (kernels.ready(one) for one in (queries, factors, grad_totals))
    written = launch.padded(kernels.spread(results, wanted, rows), rows[0])
    before = launch.padded(kernels.spread([kernels.ready(each) for each in passed], given, rows), rows[0]) if given else None
    for some in _spans(len(queries), blocks.queries):
        # One row for each program, whose sum is the gradient: no atomics, so it is the same in every run.
        by_program = torch.empty(programs, *queries[some].shape, dtype=torch.float32, device=factors.device)
        by_factor = torch.empty_like(grad_factors) if own and some.start else grad_factors
        launch.start(
            early_read_backward,
            blocks,
            n_rows,
            launch.padded(rows, rows[0]),
            written,
            before,
            factors,
            queries[some],
            tuple(kernels.ready(grad) for grad in grads[some]),
            tuple(grad_totals[some]),
            scores[some],
            log_totals[some],
            by_program,
            by_factor if own else None,
            len(sources),
            wanted,
            given,
            QUERIES=some.stop - some.start,
            **constants,
        )
        torch.sum(by_program, 0, out=grad_queries[some])
        if by_factor is not grad_factors:
            grad_factors += by_factor
        # The next launch adds to what this one has written.
        before, given = written, wanted
    return results, grad_queries, grad_factors


class _EarlyReads(torch.autograd.Function):
    """Saves the sources, a score per query, source, row and head, and one number per query, row and head; passes sources on."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, n: int, n_heads: int, passes: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        sources, factors = tensors[:n], torch.stack(tensors[n:])
        mixtures, scores, log_totals = torch.ops.twoaxis.early_read(queries, sources, factors, n_heads)
        ctx.save_for_backward(queries, factors, scores, log_totals, *sources)
        ctx.n_heads, ctx.passes = n_heads, passes
        return *mixtures, log_totals.clone(), *(v.detach() for v in sources if passes)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_gradients("early_reads")
        queries, factors, scores, log_totals, *sources = ctx.saved_tensors
        n, Q = len(sources), len(queries)
        grads, grad_totals, passed = grad_outputs[:Q], grad_outputs[Q], grad_outputs[Q + 1 :]
        wants, own = ctx.needs_input_grad[4 : 4 + n], any(ctx.needs_input_grad[4 + n :])
        given = wants if ctx.passes else [False] * n
        arrived = [one for one, is_given in zip(passed, given, strict=False) if is_given]
        results, grad_queries, grad_factors = torch.ops.twoaxis.early_read_backward(
            grads, grad_totals, queries, sources, factors, scores, log_totals, arrived,
            kernels.bits(given), kernels.bits(wants), own, ctx.n_heads,
        )  # fmt: skip
        found = iter(results)
        grad_sources = (next(found) if want else None for want in wants)
        return grad_queries, None, None, None, *grad_sources, *(grad_factors.unbind() if own else (None,) * n)


def early_reads(
    sources: Sequence[Tensor], inverse_rms: Sequence[Tensor], queries: Tensor, n_heads: int, passes: bool
) -> tuple[tuple[Tensor, ...], Tensor, tuple[Tensor, ...]]:
    """Computes `early_reads` with kernels.

    Returns:
        the mixtures, their log totals [Q B T H] and, if it passes them on, the sources for later readers, else none.
    """
    if not torch.is_grad_enabled():
        given = queries, list(sources), torch.stack(list(inverse_rms)), n_heads
        mixtures, _, log_totals = torch.ops.twoaxis.early_read(*given)
        return tuple(mixtures), log_totals, tuple(sources) if passes else ()
    Q, n = len(queries), len(sources)
    found = _EarlyReads.apply(queries, n, n_heads, passes, *kernels.distinct(sources), *kernels.distinct(inverse_rms))
    return found[:Q], found[Q], found[Q + 1 :]
