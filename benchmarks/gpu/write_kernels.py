"""The GPU kernels of writes along depth: delta writes, mixing of streams and Sinkhorn, right first and then microseconds.

Letters: N tokens, D width, C channels, n streams. An array is N D numbers of bfloat16.
"""

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.depth_kernels import ALLOWED, Call, Ways, copy_rate, timed
from benchmarks.gpu.settings import Items, Row, Settings
from twoaxis.ops import kernels
from twoaxis.ops.delta import delta_writes
from twoaxis.ops.precision import Impl
from twoaxis.ops.sinkhorn import Sinkhorn, Start, sinkhorn
from twoaxis.ops.streams import mix_pieces

EPS = 1e-6

Function = Callable[[Sequence[Tensor], Impl], tuple[Tensor, ...]]
"""Of leaves and an engine."""

STARTS: tuple[Start, ...] = ("exp", "exp_minus_max", "softmax")


def items(settings: Settings) -> Items:
    """Correctness, then a row of shapes."""
    found: Items = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        found[f"writes right in {str(dtype).removeprefix('torch.')}"] = lambda dtype=dtype: rightness(settings, dtype)
    for D in settings.pick((4096, 2048, 7168), (16,)):
        found[f"delta writes and streams, D={D}"] = lambda D=D: speed(settings, _shapes(settings, D))
    found["Sinkhorn"] = lambda: speed(settings, [_matrices(settings)])
    if settings.on_gpu:
        found["Sinkhorn, compiled"] = lambda: compiled(settings, _matrices(settings))
        for index, name in ((0, "delta write"), (2, "mixing"), (3, "read")):
            found[f"{name}, compiled"] = lambda index=index: compiled(settings, _shapes(settings, 4096)[index])
    return found


def rightness(settings: Settings, dtype: torch.dtype) -> list[Row]:
    """Results and all gradients against float64 on the device, and two runs against each other."""
    rows = []
    for C, D in settings.pick(((1, 99), (1, 4096), (4, 768), (4, 7168)), ((2, 16),)):
        rows.append(_checked(settings, dtype, f"delta write, C={C}, D={D}", delta, _delta_leaves(settings, dtype, C, 67, D)))
    for n, D, each in settings.pick(((4, 99, True), (4, 4096, True), (4, 4096, False), (2, 768, True)), ((2, 16, False),)):
        leaves = _stream_leaves(settings, dtype, n, 67, D, each)
        what = f"n={n}, D={D}, weights {'per token' if each else 'for all'}"
        rows.append(_checked(settings, dtype, f"mixing, {what}", mixing, leaves))
        rows.append(_checked(settings, dtype, f"read, {what}", reading, [leaves[0][:, :1].clone(), *leaves[3:]]))
    for start in STARTS:
        given = [2 * torch.randn(4, 4, 1, 67, device=settings.device).to(dtype)]
        rows.append(_checked(settings, dtype, f"Sinkhorn, {start}", _rounds(start), given))
    return rows


def delta(leaves: Sequence[Tensor], impl: Impl) -> tuple[Tensor, ...]:
    direction, targets, beta, *channels = leaves
    return delta_writes(channels, direction, targets, beta, EPS, impl=impl)


def mixing(leaves: Sequence[Tensor], impl: Impl) -> tuple[Tensor, ...]:
    residual, write, update, *streams = leaves
    return mix_pieces(streams, update, residual, write, 1, impl)


def reading(leaves: Sequence[Tensor], impl: Impl) -> tuple[Tensor, ...]:
    return mix_pieces(leaves[1:], None, leaves[0], None, 1, impl)


def _rounds(start: Start) -> Function:
    options = Sinkhorn(start=start, start_eps=EPS, sum_eps=EPS)
    return lambda leaves, impl: (sinkhorn(leaves[0], options, impl),)


def _delta_leaves(settings: Settings, dtype: torch.dtype, C: int, N: int, D: int) -> list[Tensor]:
    direction, *channels = (torch.randn(1, N, D, device=settings.device).to(dtype) for _ in range(C + 1))
    return [direction, torch.randn(C, 1, N, device=settings.device), torch.rand(1, N, device=settings.device), *channels]


def _stream_leaves(settings: Settings, dtype: torch.dtype, n: int, N: int, D: int, each: bool) -> list[Tensor]:
    tokens = (1, N) if each else ()
    weights = [torch.randn(rows, n, *tokens, device=settings.device) for rows in (n, 1)]
    return [*weights, *(torch.randn(1, N, D, device=settings.device).to(dtype) for _ in range(n + 1))]


def _checked(settings: Settings, dtype: torch.dtype, what: str, function: Function, given: Sequence[Tensor]) -> Row:
    found: list[list[Tensor]] = []
    cotangents: list[Tensor] = []
    engines: tuple[tuple[Impl, bool], ...] = (("fused", False), ("fused", False), ("reference", True))
    for impl, wide in engines:
        leaves = [(one.double() if wide else one.clone()).requires_grad_() for one in given]
        results = function(leaves, impl)
        cotangents = cotangents or [torch.randn(x.shape, device=settings.device).to(x.dtype) for x in results]
        gradients = torch.autograd.grad(results, leaves, [g.to(x.dtype) for g, x in zip(cotangents, results, strict=True)])
        found.append([*(x.detach() for x in results), *gradients])
    errors = [float((a.double() - b).norm() / b.norm()) for a, b in zip(found[0], found[2], strict=True)]
    allowed = [ALLOWED[x.dtype] for x in found[0]]
    n = len(cotangents)
    ok = all(error <= each[index >= n] for index, (error, each) in enumerate(zip(errors, allowed, strict=True)))
    same = all(map(torch.equal, found[0], found[1]))
    return {"what": f"{what}, {dtype}", "results": max(errors[:n]), "gradients": max(errors[n:]), "ok": ok and same}


class Shape(NamedTuple):
    """What is timed: leaves that are mixed or written by a function, and the bytes that move at the least."""

    what: str
    function: Function
    leaves: list[Tensor]
    forward_bytes: int
    backward_bytes: int


def _shapes(settings: Settings, D: int) -> list[Shape]:
    """Delta writes, and mixing and reads of four streams; the arrays that move are those of the kernels' design."""
    N = settings.pick(8192, 32)
    array, found = 2 * N * D, []
    for C in (1, 4):
        leaves = _delta_leaves(settings, torch.bfloat16, C, N, D)
        found.append(Shape(f"delta write, C={C}, D={D}", delta, leaves, (2 * C + 1) * array, (3 * C + 2) * array))
    for each in (True, False):
        leaves = _stream_leaves(settings, torch.bfloat16, 4, N, D, each)
        what = f"4 streams, weights {'per token' if each else 'for all'}, D={D}"
        found.append(Shape(f"mixing of {what}", mixing, leaves, 9 * array, 14 * array))
        reads = [leaves[0][:, :1].clone(), *leaves[3:]]
        found.append(Shape(f"read of {what}", reading, reads, 5 * array, 9 * array))
    return found


def _matrices(settings: Settings) -> Shape:
    """Matrices of four streams, twenty rounds: latency rather than bytes."""
    logits = torch.randn(4, 4, 1, settings.pick(8192, 32), device=settings.device)
    array = logits.numel() * logits.element_size()
    return Shape("Sinkhorn, 20 rounds", _rounds("exp"), [logits], 2 * array, 3 * array)


def speed(settings: Settings, shapes: Sequence[Shape]) -> list[Row]:
    """Forward, and forward with backward: kernels and torch's engine."""
    rows, copied = [], copy_rate(settings)
    for shape, both in itertools.product(shapes, (False, True)):
        call = _step(shape, both, shape.function, "fused")
        ways: Ways = {"kernels": (call, nullcontext), "torch's engine": (call, kernels.without_kernels)}
        least = shape.forward_bytes + shape.backward_bytes * both
        rows += timed(f"{shape.what}{' and its backward' if both else ''}", ways, settings, least, copied)
    return rows


def compiled(settings: Settings, shape: Shape) -> list[Row]:
    """Forward with backward: kernels, and what inductor makes of the plain form."""
    made = torch.compile(shape.function, fullgraph=True, dynamic=False)
    ways: Ways = {
        "kernels": (_step(shape, True, shape.function, "fused"), nullcontext),
        "plain form, compiled": (_step(shape, True, made, "reference"), nullcontext),
    }
    least = shape.forward_bytes + shape.backward_bytes
    return timed(f"{shape.what} and its backward, compiled", ways, settings, least, copy_rate(settings))


def _step(shape: Shape, both: bool, function: Callable[..., tuple[Tensor, ...]], impl: Impl) -> Call:
    leaves = [one.detach().requires_grad_(both) for one in shape.leaves]
    if not both:
        return lambda: function(leaves, impl)
    grads = [torch.randn_like(x) for x in function(leaves, impl)]
    return lambda: torch.autograd.grad(function(leaves, impl), leaves, grads)
