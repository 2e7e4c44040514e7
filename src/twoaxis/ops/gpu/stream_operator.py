"""Mixing of parallel streams in kernels, on a GPU or a CPU: its operators in torch's library, and their gradient.

Letters: N rows (tokens), D width, n sources, K results.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from twoaxis.ops import kernels
from twoaxis.ops.cpu import library
from twoaxis.ops.gpu import launch
from twoaxis.ops.precision import IN_PLAIN_FORMS, refuse_second_gradients

MOST_WEIGHTS = 20
"""Sums that a program of the backward pass holds: four streams and an update that are mixed to four."""

MOST_TENSORS = 10
"""Streams and update together, as many as the loads of a program find registers for."""


def _flat(weights: Tensor | None) -> Tensor | None:
    return None if weights is None else kernels.ready(weights)


def _constants(source: Tensor, residual: Tensor | None, write: Tensor | None) -> tuple[dict[str, Any], int]:
    """The constants of kernels, block sizes aside, and the number of rows."""
    D = source.shape[-1]
    each = {"RESIDUAL_EACH": residual is not None and residual.ndim > 2, "WRITE_EACH": write is not None and write.ndim > 2}
    return {"WIDTH": D, **each}, source.numel() // D


def fake_mix(sources: Sequence[Tensor], update: Tensor | None, residual: Tensor | None, write: Tensor | None) -> list[Tensor]:
    """The results of a mixing, not computed."""
    return [kernels.empty(sources[0]) for _ in range(len(sources) if residual is None else residual.shape[1])]


@kernels.operator("mix_streams(Tensor[] sources, Tensor? update, Tensor? residual, Tensor? write) -> Tensor[]", fake_mix)
def _mix(sources: Sequence[Tensor], update: Tensor | None, residual: Tensor | None, write: Tensor | None) -> list[Tensor]:
    results = fake_mix(sources, update, residual, write)
    if not sources[0].numel():
        return results
    from twoaxis.ops.gpu.stream_kernels import mix_forward

    constants, n_rows = _constants(sources[0], residual, write)
    blocks = launch.mix_blocks(constants["WIDTH"])
    given = tuple(kernels.ready(x) for x in sources), _flat(update), _flat(residual), _flat(write)
    launch.start(mix_forward, blocks, n_rows, *given, tuple(results), **constants)
    return results


def fake_backward(
    grads: Sequence[Tensor],
    sources: Sequence[Tensor],
    update: Tensor | None,
    residual: Tensor | None,
    write: Tensor | None,
    wants_residual: bool,
    wants_write: bool,
) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """The gradients of a mixing, not computed; empty where there is none."""
    none = sources[0].new_empty(0)
    return (
        [] if residual is None else [kernels.empty(x) for x in sources],
        none if update is None else kernels.empty(update),
        kernels.empty(residual) if residual is not None and wants_residual else none.clone(),
        kernels.empty(write) if write is not None and wants_write else none.clone(),
    )


@kernels.operator(
    "mix_streams_backward(Tensor[] grads, Tensor[] sources, Tensor? update, Tensor? residual, Tensor? write, "
    "bool wants_residual, bool wants_write) -> (Tensor[], Tensor, Tensor, Tensor)",
    fake_backward,
)
def _mix_backward(
    grads: Sequence[Tensor],
    sources: Sequence[Tensor],
    update: Tensor | None,
    residual: Tensor | None,
    write: Tensor | None,
    wants_residual: bool,
    wants_write: bool,
) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    found = fake_backward(grads, sources, update, residual, write, wants_residual, wants_write)
    results, grad_update, *grad_weights = found
    if not sources[0].numel():
        for one in grad_weights:
            one.zero_()
        return found
    from twoaxis.ops.gpu.stream_kernels import mix_backward

    constants, n_rows = _constants(sources[0], residual, write)
    blocks = launch.mix_backward_blocks(constants["WIDTH"])
    programs = launch.n_programs(blocks, n_rows)
    # Weights of all rows: one sum for each program, whose sum is the gradient: no atomics, so it is the same in every run.
    by_program = [
        torch.empty(programs, *one.shape, dtype=torch.float32, device=one.device) if one.ndim == 2 else one
        for one in grad_weights
    ]
    launch.start(
        mix_backward,
        blocks,
        n_rows,
        tuple(kernels.ready(x) for x in sources),
        _flat(update),
        _flat(residual),
        _flat(write),
        tuple(kernels.ready(g) for g in grads),
        tuple(results),
        None if update is None else grad_update,
        by_program[0] if wants_residual else None,
        by_program[1] if wants_write else None,
        **constants,
    )
    for one, some in zip(grad_weights, by_program, strict=True):
        if some is not one:
            one.copy_(some.sum(0))
    return found


class _MixStreams(torch.autograd.Function):
    """Saves its inputs alone."""

    @staticmethod
    def forward(
        ctx: Any, update: Tensor | None, residual: Tensor | None, write: Tensor | None, *sources: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(update, residual, write, *sources)
        return tuple(torch.ops.twoaxis.mix_streams(sources, update, residual, write))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_gradients("mixing of streams", IN_PLAIN_FORMS)
        update, residual, write, *sources = ctx.saved_tensors
        wants = ctx.needs_input_grad
        given = (
            grad_outputs,
            sources,
            update,
            residual,
            write,
            residual is not None and wants[1],
            write is not None and wants[2],
        )
        grad_sources, *others = torch.ops.twoaxis.mix_streams_backward(*given)
        # With an identity, the gradient of a stream is that of its own result.
        found = *others, *(grad_outputs if residual is None else grad_sources)
        return tuple(one if want else None for one, want in zip(found, wants, strict=True))


def serves(
    streams: Sequence[Tensor], update: Tensor | None, residual: Tensor | None, write: Tensor | None, n_fractions: int
) -> bool:
    """Whether the kernels compute this mixing: of whole streams with an update for all, and of few of them."""
    given = streams if update is None else (*streams, update)
    weights = [one for one in (residual, write) if one is not None]
    if n_fractions > 1 or not weights or (update is None) != (write is None):
        return False
    shape = streams[0].shape
    alike = all(x.shape == shape for x in given) and all(x.dtype == streams[0].dtype for x in streams)
    alike = alike and all(one.ndim == 2 or (len(shape) == 3 and one.shape[2:] == shape[:-1]) for one in weights)
    if library.concerned(streams[0]):
        few = max(len(streams), weights[0].shape[1]) <= library.MOST_TENSORS
        return alike and few and library.operator_served(*given, *weights)
    few = len(given) <= MOST_TENSORS and len(given) * weights[0].shape[1] <= MOST_WEIGHTS
    return alike and few and all(map(launch.served, (*given, *weights)))


def mix(streams: Sequence[Tensor], update: Tensor | None, residual: Tensor | None, write: Tensor | None) -> tuple[Tensor, ...]:
    """Computes `mix_pieces` of whole streams with kernels."""
    if not torch.is_grad_enabled():
        return tuple(torch.ops.twoaxis.mix_streams(list(streams), update, residual, write))
    return _MixStreams.apply(update, residual, write, *kernels.distinct(streams))
