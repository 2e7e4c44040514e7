"""The C kernels as CPU implementations of the operators in torch's library.

Letters: N rows (tokens), D width, H heads, S sources, K results, C channels.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from twoaxis.ops import kernels
from twoaxis.ops.cpu import library
from twoaxis.ops.gpu import delta_operator, depth_read_operator, norm_operator, sinkhorn_operator, stream_operator


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
    results = depth_read_operator.fake_read(query, sources, factors, early, stream, scale, n_heads, normalised)
    D = sources[0].shape[-1]
    stream = None if stream is None else kernels.ready(stream)
    given = library.rows(sources), kernels.ready(factors), kernels.ready(query), stream, scale
    sizes = len(sources), library.n_rows(sources[0]), D, n_heads
    library.call("depth_read", *given, *results, *sizes, query.ndim > 1, normalised)
    return results


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
    found = depth_read_operator.fake_backward(
        grad, query, sources, factors, early, scale, scores, log_totals, passed, given, wanted, *flags
    )
    results, grad_query, grad_factors, grad_scale, _ = found
    S, D, absent = len(sources), sources[0].shape[-1], [None] * len(sources)
    library.call(
        "depth_read_backward",
        *map(kernels.ready, (grad, query)),
        library.rows(sources),
        kernels.ready(factors),
        scale,
        scores,
        log_totals,
        kernels.spread(library.rows(passed), given, absent),
        kernels.spread(results, wanted, absent),
        grad_query,
        grad_factors if own else None,
        grad_scale,
        library.scratch((2 * S + 1) * n_heads),
        library.scratch(D),
        library.scratch(),
        *(S, library.n_rows(sources[0]), D, n_heads),
        query.ndim > 1,
        normalised,
    )
    return found


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    factors = norm_operator.fake(x, eps)
    library.call("inverse_rms", kernels.ready(x), eps, factors, factors.numel(), x.shape[-1])
    return factors


def _inverse_rms_backward(x: Tensor, factors: Tensor, by_factor: Tensor, passed: Tensor | None) -> Tensor:
    result = norm_operator.fake_backward(x, factors, by_factor, passed)
    given = [None if one is None else kernels.ready(one) for one in (x, factors, by_factor, passed)]
    library.call("inverse_rms_backward", *given, result, factors.numel(), x.shape[-1])
    return result


def _mixing(sources: Sequence[Tensor], update: Tensor | None, residual: Tensor | None, write: Tensor | None) -> list[Any]:
    """The arguments that both directions of a mixing begin with, behind the results' gradients."""
    update, residual, write = (None if x is None else kernels.ready(x) for x in (update, residual, write))
    each = [x is not None and x.ndim > 2 for x in (residual, write)]
    return [library.rows(sources), update, residual, each[0], write, each[1]]


def _mix(sources: Sequence[Tensor], update: Tensor | None, residual: Tensor | None, write: Tensor | None) -> list[Tensor]:
    results = stream_operator.fake_mix(sources, update, residual, write)
    D = sources[0].shape[-1]
    sizes = len(sources), len(results), library.n_rows(sources[0]), D
    library.call("mix_streams", *_mixing(sources, update, residual, write), results, *sizes)
    return results


def _mix_backward(
    grads: Sequence[Tensor],
    sources: Sequence[Tensor],
    update: Tensor | None,
    residual: Tensor | None,
    write: Tensor | None,
    wants_residual: bool,
    wants_write: bool,
) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    found = stream_operator.fake_backward(grads, sources, update, residual, write, wants_residual, wants_write)
    results, grad_update, grad_residual, grad_write = found
    S, K, D = len(sources), len(grads), sources[0].shape[-1]
    library.call(
        "mix_streams_backward",
        library.rows(grads),
        *_mixing(sources, update, residual, write),
        results or [None] * S,
        None if update is None else grad_update,
        grad_residual if residual is not None and wants_residual else None,
        grad_write if write is not None and wants_write else None,
        library.scratch(S * K),
        library.scratch(K),
        *(S, K, library.n_rows(sources[0]), D),
    )
    return found


def _write(
    channels: Sequence[Tensor], direction: Tensor, targets: Tensor, beta: Tensor, eps: float, erases: bool
) -> list[Tensor]:
    results = delta_operator.fake_write(channels, direction, targets, beta, eps, erases)
    given = map(kernels.ready, (direction, targets, beta))
    library.call(
        "delta_write", library.rows(channels), results, *given, eps, erases, len(channels), beta.numel(), direction.shape[-1]
    )
    return results


def _write_backward(
    grads: Sequence[Tensor],
    channels: Sequence[Tensor],
    direction: Tensor,
    targets: Tensor,
    beta: Tensor,
    eps: float,
    erases: bool,
) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    found = results, *others = delta_operator.fake_backward(grads, channels, direction, targets, beta, eps, erases)
    given = map(kernels.ready, (direction, targets, beta))
    sizes = len(channels), beta.numel(), direction.shape[-1]
    library.call(
        "delta_write_backward", library.rows(grads), library.rows(channels), results, *given, *others, eps, erases, *sizes
    )
    return found


STARTS = ("exp", "exp_minus_max", "softmax")


def _sinkhorn(logits: Tensor, rounds: int, first_axis: int, start: str, start_eps: float, sum_eps: float) -> Tensor:
    options = rounds, first_axis, start, start_eps, sum_eps
    result = sinkhorn_operator.fake(logits, *options)
    library.call("sinkhorn", kernels.ready(logits), result, *_rounds(logits, *options))
    return result


def _sinkhorn_backward(
    grad: Tensor, logits: Tensor, rounds: int, first_axis: int, start: str, start_eps: float, sum_eps: float
) -> Tensor:
    options = rounds, first_axis, start, start_eps, sum_eps
    result = sinkhorn_operator.fake_backward(grad, logits, *options)
    library.call("sinkhorn_backward", kernels.ready(grad), kernels.ready(logits), result, *_rounds(logits, *options))
    return result


def _rounds(logits: Tensor, rounds: int, first_axis: int, start: str, start_eps: float, sum_eps: float) -> list[Any]:
    """The arguments that both directions end with."""
    n = logits.shape[0]
    options = rounds, first_axis, STARTS.index(start), start_eps, sum_eps
    return [library.scratch(2 * rounds * n, library.BLOCK), *options, n, logits.numel() // max(1, n * n)]


def register() -> None:
    """Registers all of them for tensors of a CPU."""
    for name, implementation in IMPLEMENTATIONS.items():
        kernels.LIBRARY.impl(name, implementation, "CPU")


IMPLEMENTATIONS: Mapping[str, Callable[..., Any]] = {
    "depth_read": _read,
    "depth_read_backward": _read_backward,
    "inverse_rms": _inverse_rms,
    "inverse_rms_backward": _inverse_rms_backward,
    "mix_streams": _mix,
    "mix_streams_backward": _mix_backward,
    "delta_write": _write,
    "delta_write_backward": _write_backward,
    "sinkhorn": _sinkhorn,
    "sinkhorn_backward": _sinkhorn_backward,
}
