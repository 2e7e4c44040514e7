"""The depth read in kernels, on a GPU or a CPU: its operators in torch's library, and their gradient.

Letters: N rows (tokens), D width, H heads, S depth sources.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from twoaxis.ops import kernels
from twoaxis.ops.cpu import library
from twoaxis.ops.gpu import launch
from twoaxis.ops.precision import refuse_second_gradients


def shapes(sources: Sequence[Tensor], n_heads: int) -> tuple[dict[str, Any], int]:
    """The constants of kernels that read these sources, block sizes aside, and the number of rows."""
    D = sources[0].shape[-1]
    slots = launch.power_of_two(n_heads)
    constants = {
        "WIDTH": D,
        "HEADS": n_heads,
        "SLOTS": slots,
        "LANES": launch.lanes_of(D, n_heads) // slots,
    }
    return constants, sources[0].numel() // D


def fake_read(
    query: Tensor,
    sources: Sequence[Tensor],
    factors: Tensor,
    early: Sequence[Tensor],
    stream: Tensor | None,
    scale: Tensor | None,
    n_heads: int,
    normalised: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The results of a read, not computed: the mixture, the scores and the log totals."""
    v = sources[0]
    mixed = kernels.empty(v)
    scores = torch.empty(len(sources), *v.shape[:-1], n_heads, dtype=torch.float32, device=v.device)
    return mixed, scores, torch.empty(*v.shape[:-1], n_heads, dtype=torch.float32, device=v.device)


@kernels.operator(
    "depth_read(Tensor query, Tensor[] sources, Tensor factors, Tensor[] early, Tensor? stream, Tensor? scale, int n_heads, "
    "bool normalised) -> (Tensor, Tensor, Tensor)",
    fake_read,
)
def _read(
    query: Tensor,
    sources: Sequence[Tensor],
    factors: Tensor,
    early: Sequence[Tensor],
    stream: Tensor | None,
    scale: Tensor | None,
    n_heads: int,
    normalised: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    mixed, scores, log_totals = results = fake_read(query, sources, factors, early, stream, scale, n_heads, normalised)
    constants, n_rows = shapes(sources, n_heads)
    if n_rows == 0:
        return results
    from twoaxis.ops.gpu.depth_read_kernels import depth_read_forward

    blocks = launch.read_blocks(constants["SLOTS"] * constants["LANES"], len(sources), sources[0].element_size())
    rows = [kernels.ready(v) for v in sources]
    launch.start(
        depth_read_forward,
        blocks,
        n_rows,
        launch.padded(rows, rows[0]),
        kernels.ready(factors),
        kernels.ready(query),
        *(map(kernels.ready, early) if early else (None, None)),
        None if stream is None else kernels.ready(stream),
        scale,
        mixed,
        scores,
        log_totals,
        len(sources),
        QUERY_EACH=query.ndim > 1,
        NORMALISED=normalised,
        **constants,
    )
    return results


def fake_backward(
    grad: Tensor,
    query: Tensor,
    sources: Sequence[Tensor],
    factors: Tensor,
    early: Sequence[Tensor],
    scale: Tensor | None,
    scores: Tensor,
    log_totals: Tensor,
    passed: Sequence[Tensor],
    given: int,
    wanted: int,
    own: bool,
    normalised: bool,
    n_heads: int,
) -> tuple[list[Tensor], Tensor, Tensor, Tensor, list[Tensor]]:
    """The gradients of a read, not computed: sources that want one, query, factors, scale, early read."""
    like = [v for index, v in enumerate(sources) if wanted >> index & 1]
    results = [kernels.empty(v) for v in like]
    grad_query = kernels.empty(query)
    grad_factors = torch.empty(factors.shape if own else (0,), dtype=factors.dtype, device=factors.device)
    grad_scale = torch.empty(1, dtype=torch.float32, device=grad.device)
    return results, grad_query, grad_factors, grad_scale, [torch.empty_like(one) for one in early]


@kernels.operator(
    "depth_read_backward(Tensor grad, Tensor query, Tensor[] sources, Tensor factors, Tensor[] early, Tensor? scale, "
    "Tensor scores, Tensor log_totals, Tensor[] passed, int given, int wanted, bool own, bool normalised, int n_heads)"
    " -> (Tensor[], Tensor, Tensor, Tensor, Tensor[])",
    fake_backward,
)
def _read_backward(
    grad: Tensor,
    query: Tensor,
    sources: Sequence[Tensor],
    factors: Tensor,
    early: Sequence[Tensor],
    scale: Tensor | None,
    scores: Tensor,
    log_totals: Tensor,
    passed: Sequence[Tensor],
    given: int,
    wanted: int,
    own: bool,
    normalised: bool,
    n_heads: int,
) -> tuple[list[Tensor], Tensor, Tensor, Tensor, list[Tensor]]:
    flags = own, normalised, n_heads
    found = fake_backward(grad, query, sources, factors, early, scale, scores, log_totals, passed, given, wanted, *flags)
    results, grad_query, grad_factors, grad_scale, grad_early = found
    constants, n_rows = shapes(sources, n_heads)
    if n_rows == 0:
        return results, grad_query.zero_(), grad_factors, grad_scale.zero_(), grad_early
    from twoaxis.ops.gpu.depth_read_kernels import depth_read_backward

    blocks = launch.read_backward_blocks(constants["SLOTS"] * constants["LANES"], len(sources), sources[0].element_size())
    programs = launch.n_programs(blocks, n_rows)
    # One row for each program, whose sum is the gradient: no atomics, so it is the same in every run.
    by_program = None if query.ndim > 1 else torch.empty(programs, query.numel(), dtype=torch.float32, device=grad.device)
    scale_by_program = None if scale is None else torch.empty(programs, dtype=torch.float32, device=grad.device)
    rows = [kernels.ready(v) for v in sources]
    launch.start(
        depth_read_backward,
        blocks,
        n_rows,
        launch.padded(rows, rows[0]),
        launch.padded(kernels.spread(results, wanted, rows), rows[0]),
        launch.padded(kernels.spread([kernels.ready(each) for each in passed], given, rows), rows[0]) if given else None,
        kernels.ready(factors),
        kernels.ready(query),
        *(map(kernels.ready, early) if early else (None, None)),
        scale,
        kernels.ready(grad),
        scores,
        log_totals,
        grad_query if by_program is None else by_program,
        grad_factors if own else None,
        scale_by_program,
        *(grad_early or (None, None)),
        len(sources),
        wanted,
        given,
        QUERY_EACH=query.ndim > 1,
        NORMALISED=normalised,
        **constants,
    )
    if by_program is not None:
        torch.sum(by_program, 0, out=grad_query) if query.dtype == torch.float32 else grad_query.copy_(by_program.sum(0))
    if scale_by_program is not None:
        torch.sum(scale_by_program, 0, keepdim=True, out=grad_scale)
    return results, grad_query, grad_factors, grad_scale, grad_early


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
        n: int,
        n_heads: int,
        normalised: bool,
        passes: bool,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        sources, factors, early = tensors[:n], torch.stack(tensors[n : 2 * n]), tensors[2 * n :]
        given = query, sources, factors, early, stream, scale, n_heads, normalised
        mixed, scores, log_totals = torch.ops.twoaxis.depth_read(*given)
        ctx.save_for_backward(query, scale, factors, scores, log_totals, *sources, *early)
        ctx.n, ctx.n_heads, ctx.normalised = n, n_heads, normalised
        ctx.set_materialize_grads(False)
        return mixed, *(v.detach() for v in sources if passes)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_gradients("depth_read")
        query, scale, factors, scores, log_totals, *tensors = ctx.saved_tensors
        n, grad = ctx.n, grad_outputs[0]
        sources, early, passed = tensors[:n], tensors[n:], grad_outputs[1:] or (None,) * n
        if grad is None:
            return *(None,) * 7, *passed, *(None,) * (n + len(early))
        wants, own = ctx.needs_input_grad[7 : 7 + n], any(ctx.needs_input_grad[7 + n : 7 + 2 * n])
        given = [one is not None and want for one, want in zip(passed, wants, strict=True)]
        arrived = [one for one, is_given in zip(passed, given, strict=True) if is_given]
        results, grad_query, grad_factors, grad_scale, grad_early = torch.ops.twoaxis.depth_read_backward(
            grad, query, sources, factors, early, scale, scores, log_totals, arrived,
            kernels.bits(given), kernels.bits(wants), own, ctx.normalised, ctx.n_heads,
        )  # fmt: skip
        grad_stream = grad if ctx.needs_input_grad[1] else None
        grad_scale = None if scale is None else grad_scale.to(scale.dtype)
        found = iter(results)
        grad_sources = (next(found) if want else None for want in wants)
        by_factor = grad_factors.unbind() if own else (None,) * n
        return grad_query, grad_stream, grad_scale, *(None,) * 4, *grad_sources, *by_factor, *grad_early


def serves(sources: Sequence[Tensor], n_heads: int) -> bool:
    """Whether the kernels of a GPU compute a read of these sources."""
    return launch.served(sources[0]) and launch.fits(sources[0].shape[-1], n_heads, len(sources))


def serves_on_cpu(
    sources: Sequence[Tensor],
    inverse_rms: Sequence[Tensor],
    query: Tensor,
    n_heads: int,
    stream: Tensor | None,
    scale: Tensor | None,
) -> bool:
    """Whether the kernels of a CPU compute this read, whose shapes are exact: nothing is broadcast."""
    v = sources[0]
    fits = len(sources) <= launch.MOST_SOURCES and v.shape[-1] % n_heads == 0
    fits = fits and query.shape in (v.shape[-1:], v.shape) and all(r.shape == v.shape[:-1] for r in inverse_rms)
    fits = fits and (stream is None or stream.shape == v.shape) and (scale is None or (scale.numel() == 1 and scale.ndim <= 1))
    return fits and library.operator_served(*sources, *inverse_rms, query, stream, scale)


def read(
    sources: Sequence[Tensor],
    inverse_rms: Sequence[Tensor],
    query: Tensor,
    n_heads: int,
    stream: Tensor | None,
    scale: Tensor | None,
    normalised: bool,
    passes: bool = False,
    early: Sequence[Tensor] = (),
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Computes `depth_read` with kernels, or `late_read` with an early read: its mixture and its log total.

    Returns:
        the read and, if it passes them on, the sources for later readers, else none. A compiled pass reads zeros for sources
        that are passed on to nobody.
    """
    if not torch.is_grad_enabled():
        # Without gradients there is nothing that could meet in one buffer.
        given = query, list(sources), torch.stack(list(inverse_rms)), list(early), stream, scale, n_heads, normalised
        return torch.ops.twoaxis.depth_read(*given)[0], tuple(sources) if passes else ()
    flags = len(sources), n_heads, normalised, passes
    mixed, *passed = _DepthRead.apply(
        query, stream, scale, *flags, *kernels.distinct(sources), *kernels.distinct(inverse_rms), *early
    )
    return mixed, tuple(passed)
