"""The depth read on a GPU: its operators in torch's library, and their gradient.

Letters: N rows (tokens), D width, H heads, S depth sources.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from twoaxis.ops.gpu import launch


def _shapes(query: Tensor, sources: Sequence[Tensor], n_heads: int) -> tuple[dict[str, Any], int]:
    """The constants of both kernels, and the number of rows."""
    D = sources[0].shape[-1]
    slots = launch.power_of_two(n_heads)
    constants = {
        "WIDTH": D,
        "HEADS": n_heads,
        "SLOTS": slots,
        "LANES": launch.lanes_of(D, n_heads) // slots,
        "QUERY_EACH": query.ndim > 1,
    }
    return constants, sources[0].numel() // D


def _fake_read(
    query: Tensor,
    sources: Sequence[Tensor],
    factors: Tensor,
    stream: Tensor | None,
    scale: Tensor | None,
    n_heads: int,
    normalised: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    v = sources[0]
    mixed = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    scores = torch.empty(len(sources), *v.shape[:-1], n_heads, dtype=torch.float32, device=v.device)
    return mixed, scores, torch.empty(*v.shape[:-1], n_heads, dtype=torch.float32, device=v.device)


@launch.operator(
    "depth_read(Tensor query, Tensor[] sources, Tensor factors, Tensor? stream, Tensor? scale, int n_heads, bool normalised)"
    " -> (Tensor, Tensor, Tensor)",
    _fake_read,
)
def _read(
    query: Tensor,
    sources: Sequence[Tensor],
    factors: Tensor,
    stream: Tensor | None,
    scale: Tensor | None,
    n_heads: int,
    normalised: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    mixed, scores, log_totals = results = _fake_read(query, sources, factors, stream, scale, n_heads, normalised)
    constants, n_rows = _shapes(query, sources, n_heads)
    if n_rows == 0:
        return results
    from twoaxis.ops.gpu.depth_read_kernels import depth_read_forward

    blocks = launch.read_blocks(constants["SLOTS"] * constants["LANES"], len(sources))
    rows = [launch.ready(v) for v in sources]
    launch.start(
        depth_read_forward,
        blocks,
        n_rows,
        launch.padded(rows, rows[0]),
        launch.ready(factors),
        launch.ready(query),
        None if stream is None else launch.ready(stream),
        scale,
        mixed,
        scores,
        log_totals,
        len(sources),
        NORMALISED=normalised,
        **constants,
    )
    return results


def _fake_backward(
    grad: Tensor,
    query: Tensor,
    sources: Sequence[Tensor],
    factors: Tensor,
    scale: Tensor | None,
    scores: Tensor,
    log_totals: Tensor,
    passed: Sequence[Tensor],
    given: int,
    wanted: int,
    own: bool,
    normalised: bool,
    n_heads: int,
) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    like = [v for index, v in enumerate(sources) if wanted >> index & 1]
    results = [torch.empty(v.shape, dtype=v.dtype, device=v.device) for v in like]
    grad_query = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    grad_factors = torch.empty(factors.shape if own else (0,), dtype=factors.dtype, device=factors.device)
    return results, grad_query, grad_factors, torch.empty(1, dtype=torch.float32, device=grad.device)


@launch.operator(
    "depth_read_backward(Tensor grad, Tensor query, Tensor[] sources, Tensor factors, Tensor? scale, Tensor scores, "
    "Tensor log_totals, Tensor[] passed, int given, int wanted, bool own, bool normalised, int n_heads)"
    " -> (Tensor[], Tensor, Tensor, Tensor)",
    _fake_backward,
)
def _read_backward(
    grad: Tensor,
    query: Tensor,
    sources: Sequence[Tensor],
    factors: Tensor,
    scale: Tensor | None,
    scores: Tensor,
    log_totals: Tensor,
    passed: Sequence[Tensor],
    given: int,
    wanted: int,
    own: bool,
    normalised: bool,
    n_heads: int,
) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    flags = own, normalised, n_heads
    found = _fake_backward(grad, query, sources, factors, scale, scores, log_totals, passed, given, wanted, *flags)
    results, grad_query, grad_factors, grad_scale = found
    constants, n_rows = _shapes(query, sources, n_heads)
    if n_rows == 0:
        grad_scale.zero_()
        return results, grad_query.zero_(), grad_factors, grad_scale
    from twoaxis.ops.gpu.depth_read_kernels import depth_read_backward

    blocks = launch.read_backward_blocks(constants["SLOTS"] * constants["LANES"], len(sources))
    programs = launch.n_programs(blocks, n_rows)
    # One row for each program, whose sum is the gradient: no atomics, so it is the same in every run.
    by_program = (
        None if constants["QUERY_EACH"] else torch.empty(programs, query.numel(), dtype=torch.float32, device=grad.device)
    )
    scale_by_program = None if scale is None else torch.empty(programs, dtype=torch.float32, device=grad.device)
    rows = [launch.ready(v) for v in sources]
    launch.start(
        depth_read_backward,
        blocks,
        n_rows,
        launch.padded(rows, rows[0]),
        launch.padded(launch.spread(results, wanted, rows), rows[0]),
        launch.padded(launch.spread([launch.ready(each) for each in passed], given, rows), rows[0]) if given else None,
        launch.ready(factors),
        launch.ready(query),
        scale,
        launch.ready(grad),
        scores,
        log_totals,
        grad_query if by_program is None else by_program,
        grad_factors if own else None,
        scale_by_program,
        len(sources),
        wanted,
        given,
        NORMALISED=normalised,
        **constants,
    )
    if by_program is not None:
        torch.sum(by_program, 0, out=grad_query) if query.dtype == torch.float32 else grad_query.copy_(by_program.sum(0))
    if scale_by_program is not None:
        torch.sum(scale_by_program, 0, keepdim=True, out=grad_scale)
    return results, grad_query, grad_factors, grad_scale


class _DepthRead(torch.autograd.Function):
    """Saves the sources, a score per source, row and head, and one number per row and head.

    If it passes them on, the sources are also returned, as tensors of their own. A later reader that takes them from here hands
    its gradients back through this read, which adds its own before they are stored: one array is read and one written per
    source and read, where autograd would read two more and write one more.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        stream: Tensor | None,
        scale: Tensor | None,
        n_heads: int,
        normalised: bool,
        passes: bool,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        n = len(tensors) // 2
        sources, factors = tensors[:n], torch.stack(tensors[n:])
        mixed, scores, log_totals = torch.ops.twoaxis.depth_read(query, sources, factors, stream, scale, n_heads, normalised)
        ctx.save_for_backward(query, scale, factors, scores, log_totals, *sources)
        ctx.n_heads, ctx.normalised = n_heads, normalised
        ctx.set_materialize_grads(False)
        return mixed, *(v.detach() for v in sources if passes)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        query, scale, factors, scores, log_totals, *sources = ctx.saved_tensors
        n, grad = len(sources), grad_outputs[0]
        passed = grad_outputs[1:] or (None,) * n
        if grad is None:
            return *(None,) * 6, *passed, *(None,) * n
        wants, own = ctx.needs_input_grad[6 : 6 + n], any(ctx.needs_input_grad[6 + n :])
        given = [one is not None and want for one, want in zip(passed, wants, strict=True)]
        results, grad_query, grad_factors, grad_scale = torch.ops.twoaxis.depth_read_backward(
            grad, query, sources, factors, scale, scores, log_totals,
            [one for one, is_given in zip(passed, given, strict=True) if is_given],
            launch.bits(given), launch.bits(wants), own, ctx.normalised, ctx.n_heads,
        )  # fmt: skip
        found = iter(results)
        grad_stream = grad if ctx.needs_input_grad[1] else None
        grad_scale = None if scale is None else grad_scale.to(scale.dtype)
        by_factor = grad_factors.unbind() if own else (None,) * n
        return (
            grad_query,
            grad_stream,
            grad_scale,
            None,
            None,
            None,
            *(next(found) if want else None for want in wants),
            *by_factor,
        )


def serves(sources: Sequence[Tensor], n_heads: int) -> bool:
    """Whether the kernels compute a read of these sources."""
    return launch.served(sources[0]) and launch.fits(sources[0].shape[-1], n_heads, len(sources))


def read(
    sources: Sequence[Tensor],
    inverse_rms: Sequence[Tensor],
    query: Tensor,
    n_heads: int,
    stream: Tensor | None,
    scale: Tensor | None,
    normalised: bool,
    passes: bool = False,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Computes `depth_read` with kernels.

    Returns:
        the read and, if it passes them on, the sources for later readers, else none. A compiled pass reads zeros for sources
        that are passed on to nobody.
    """
    mixed, *passed = _DepthRead.apply(query, stream, scale, n_heads, normalised, passes, *sources, *inverse_rms)
    return mixed, tuple(passed)
