"""The GPU kernels of reads along depth: right first, then microseconds, and the share of what a copy on this device moves.

Letters: N tokens, D width, S sources. An array is N D numbers of the sources' type; counted is what has to be read and written
at the least, which the kernels' design says.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.settings import Items, Row, Settings
from benchmarks.gpu.worker import one_line
from twoaxis.ops import kernels
from twoaxis.ops.depth_read import depth_read, passing_factor, passing_read, source_factor
from twoaxis.ops.gpu import launch
from twoaxis.ops.norm import inverse_rms
from twoaxis.ops.precision import Impl
from twoaxis.ops.two_phase import early_reads, late_read

EPS = 1e-6

ALLOWED = {torch.float32: (1e-6, 1e-5), torch.float16: (1e-3, 1e-3), torch.bfloat16: (3e-3, 6e-3)}
"""Largest relative errors of a result and of a gradient; gradients of queries are in float32 whatever the sources are."""

CALLS, ROUNDS = 10, 7
"""Calls of a captured graph, and replays of it."""

Call = Callable[[], object]
Scope = Callable[[], AbstractContextManager[object]]
Ways = dict[str, tuple[Call, Scope]]
"""What is timed, by name, and where: with other block sizes, or without kernels."""


RIGHT = (
    (torch.bfloat16, 9, 4096, 1, True),
    (torch.bfloat16, 5, 99, 3, True),
    (torch.float32, 9, 1000, 1, True),
    (torch.bfloat16, 9, 768, 12, False),
    (torch.bfloat16, 25, 7168, 1, False),
    (torch.float32, 2, 48, 1, False),
    (torch.float16, 9, 100, 1, True),
)
"""Type, S, D, H, and whether the inverse rms have gradients of their own; each compiles six kernels, which takes seconds."""


def items(settings: Settings) -> Items:
    """Correctness, then reads of many shapes, then what a whole block of readers costs; a new shape is compiled first."""
    found: Items = {}
    for case in settings.pick(RIGHT, tuple((dtype, 3, 16, 2, True) for dtype in ALLOWED)):
        dtype, n, D, H, own = case
        what = f"S={n}, D={D}, H={H}, rms {'of its own' if own else 'a statistic'}, {_name(dtype)}"
        found[f"right: {what}"] = lambda what=what, case=case: [{"what": what, **_checked(settings, *case)}]
    found["same bits, captured, compiled"] = lambda: modes(settings)
    found["inverse rms of a source"] = lambda: factors_of_a_source(settings)
    # Of each size first the one that stands for many.
    for D in settings.pick((4096, 7168, 2048), (16,)):
        for n in settings.pick((9, 3, 25), (3,)):
            found[f"read, S={n}, D={D}"] = lambda n=n, D=D: reads(settings, n, D)
            found.setdefault(f"readers of a block, D={D}", lambda D=D: readers(settings, D))
    return found


def _checked(settings: Settings, dtype: torch.dtype, n: int, D: int, n_heads: int, own: bool) -> Row:
    N = 67
    given = [torch.randn(D, device=settings.device) / D**0.5, torch.randn(1, N, D, device=settings.device).to(dtype)]
    # Half as a source would be after many layers: large ones beside small ones.
    given += [(torch.randn(1, N, D, device=settings.device) * 30.0 ** (i % 2)).to(dtype) for i in range(n)]
    cotangent = torch.randn(1, N, D, device=settings.device).to(dtype)
    found: list[list[Tensor]] = []
    engines: tuple[tuple[Impl, bool], ...] = (("fused", False), ("reference", True))
    for impl, wide in engines:
        leaves = [(one.double() if wide else one.clone()).requires_grad_() for one in given]
        query, stream, *sources = leaves
        factors = [source_factor(v, EPS, "reference") if own else inverse_rms(v, EPS) for v in sources]
        mixed = depth_read(sources, factors, query, impl, n_heads=n_heads, stream=stream)
        half = n - 1
        (early,) = early_reads(sources[:half], factors[:half], [query], n_heads, impl)
        later = late_read(early, sources[half:], factors[half:], query, impl)
        # Two results at once, so that their gradients meet.
        gradients = torch.autograd.grad((mixed, later), leaves, (cotangent.to(mixed.dtype), cotangent.to(later.dtype)))
        found.append([mixed.detach(), later.detach(), *gradients])
    errors = [float((a.double() - b).norm() / b.norm()) for a, b in zip(*found, strict=True)]
    value, gradient = ALLOWED[dtype]
    ok = max(errors[:2]) <= value and errors[2] <= ALLOWED[torch.float32][1] and max(errors[3:]) <= gradient
    return {"results": max(errors[:2]), "query": errors[2], "sources": max(errors[3:]), "ok": ok}


def modes(settings: Settings) -> list[Row]:
    """Two runs have the same bits; a captured graph and a compiled function compute the same as an eager call."""
    query, sources, factors = _inputs(settings, 5, settings.pick(768, 16), 129)

    def step(*leaves: Tensor) -> list[Tensor]:
        q, *vs = leaves
        mixed, passed = passing_read(vs, factors, q)
        again, _ = passing_read(passed, factors, q * 2)
        return [mixed.detach(), *torch.autograd.grad((mixed + again).float().square().sum(), leaves)]

    first, second = step(query, *sources), step(query, *sources)
    rows: list[Row] = [{"what": "two runs", "ok": all(map(torch.equal, first, second))}]
    if settings.on_gpu:
        rows += [_attempt("captured", lambda: _captured(lambda: depth_read(sources, factors, query)))]
        compiled = torch.compile(lambda q, *vs: depth_read(vs, factors, q), fullgraph=True, dynamic=False)
        rows += [_attempt("compiled", lambda: torch.equal(compiled(query, *sources), depth_read(sources, factors, query)))]
    return rows


def _captured(call: Callable[[], Tensor]) -> bool:
    with torch.no_grad():
        expected = call()
        graph, result = torch.cuda.CUDAGraph(), expected
        with torch.cuda.graph(graph):
            result = call()
        result.zero_()
        graph.replay()
        torch.cuda.synchronize()
        return torch.equal(result, expected)


def _attempt(what: str, holds: Callable[[], bool]) -> Row:
    try:
        return {"what": what, "ok": holds()}
    except Exception as failure:
        return {"what": what, "ok": False, "error": one_line(failure)}


def reads(settings: Settings, n: int, D: int) -> list[Row]:
    """One read, forward and backward: kernels at their block sizes and at others, and torch's engine."""
    N = settings.pick(8192, 32)
    query, sources, factors = _inputs(settings, n, D, N)
    copied, array = copy_rate(settings), N * D * sources[0].element_size()
    grad, leaves = torch.randn_like(sources[0]), [query, *sources]

    def forward() -> Tensor:
        with torch.no_grad():
            return depth_read(sources, factors, query)

    def both() -> object:
        return torch.autograd.grad(depth_read(sources, factors, query), leaves, grad)

    usual: Ways = {"kernels": (forward, nullcontext), "torch's engine": (forward, kernels.without_kernels)}
    others: Ways = {name: (forward, scope) for name, scope in _other_blocks("read_blocks", n, D)}
    rows = timed(f"read forward, S={n}, D={D}", usual | others, settings, (n + 1) * array, copied)
    usual = {"kernels": (both, nullcontext), "torch's engine": (both, kernels.without_kernels)}
    rows += timed(f"read and its backward, S={n}, D={D}", usual, settings, (3 * n + 2) * array, copied)
    if not launch.served(sources[0]):
        return rows
    alone, passing = (
        _backward(query, sources, factors, grad, passed) for passed in ([], [torch.randn_like(v) for v in sources])
    )
    others = {name: (alone, scope) for name, scope in _other_blocks("read_backward_blocks", n, D)}
    rows += timed(f"backward, S={n}, D={D}", {"kernels": (alone, nullcontext), **others}, settings, (2 * n + 1) * array, copied)
    what = f"backward, added to gradients of later readers, S={n}, D={D}"
    return rows + timed(what, {"kernels": (passing, nullcontext)}, settings, (3 * n + 1) * array, copied)


def _backward(query: Tensor, sources: list[Tensor], factors: list[Tensor], grad: Tensor, passed: list[Tensor]) -> Call:
    """The backward pass alone, as autograd would call it: a captured graph has to hold the forward pass otherwise."""
    with torch.no_grad():
        stacked, every = torch.stack(factors), kernels.bits([True] * len(sources))
        _, scores, totals = torch.ops.twoaxis.depth_read(query, sources, stacked, [], None, None, 1, False)
    saved = grad, query, sources, stacked, [], None, scores, totals, passed, every if passed else 0, every, True, False, 1

    def call() -> object:
        with torch.no_grad():
            return torch.ops.twoaxis.depth_read_backward(*saved)

    return call


def _other_blocks(table: str, n: int, D: int) -> Iterator[tuple[str, Scope]]:
    """Other numbers of programs, and at the shape that stands for many other block sizes, which have to be compiled."""
    usual: launch.Blocks = getattr(launch, table)(launch.lanes_of(D, 1), n, 2)
    some: list[launch.Blocks] = []
    if (n, D) == (9, 4096):
        some = [usual._replace(group=max(1, usual.group // 2)), usual._replace(stages=3), usual._replace(warps=4)]
    if usual.programs:
        some += [usual._replace(programs=usual.programs // 2), usual._replace(programs=usual.programs * 2)]
    for one in some:
        yield f"kernels, {_described(one)}", partial(_blocks, table, one)


@contextmanager
def _blocks(table: str, blocks: launch.Blocks) -> Iterator[None]:
    before = getattr(launch, table)
    setattr(launch, table, lambda *shape: blocks)
    try:
        yield
    finally:
        setattr(launch, table, before)


def _described(blocks: launch.Blocks) -> str:
    programs = f", {blocks.programs} programs" if blocks.programs else ""
    return f"groups of {blocks.group}, {blocks.warps} warps, {blocks.stages} stages{programs}"


def factors_of_a_source(settings: Settings) -> list[Row]:
    """The inverse rms of a source that is passed on, forward and backward with the gradient of its readers."""
    N, D = settings.pick((8192, 4096), (32, 16))
    v = torch.randn(1, N, D, device=settings.device).to(torch.bfloat16).requires_grad_()
    by_factor, passed = torch.randn(1, N, device=settings.device), torch.randn_like(v)

    def both() -> object:
        factor, source = passing_factor(v, EPS)
        if source is v:
            # Where nothing is passed on, autograd adds.
            return torch.autograd.grad(factor, v, by_factor)[0] + passed
        return torch.autograd.grad((factor, source), v, (by_factor, passed))

    ways: Ways = {"kernels": (both, nullcontext), "torch's engine": (both, kernels.without_kernels)}
    return timed(f"inverse rms and its backward, D={D}", ways, settings, 4 * N * D * v.element_size(), copy_rate(settings))


def readers(settings: Settings, D: int) -> list[Row]:
    """Eight completed sources and eight readers, forward and backward, with the adding up of gradients that autograd does."""
    n, Q, N = 8, 8, settings.pick(8192, 32)
    _, sources, factors = _inputs(settings, n, D, N)
    queries = [torch.randn(D, device=settings.device, requires_grad=True) for _ in range(Q)]
    leaves = [*queries, *sources]
    grad = torch.randn_like(sources[0])

    def apart(impl: Impl = "fused") -> list[Tensor]:
        return [depth_read(sources, factors, query, impl) for query in queries]

    def passing() -> list[Tensor]:
        taken, found = tuple(sources), []
        for query in queries:
            mixed, taken = passing_read(taken, factors, query)
            found.append(mixed)
        return found

    def phases() -> list[Tensor]:
        return [read.mixture.to(sources[0].dtype) for read in early_reads(sources, factors, queries)]

    def step(forward: Callable[[], list[Tensor]]) -> Call:
        return lambda: torch.autograd.grad(forward(), leaves, [grad] * Q)

    ways = {"kernels, one by one": apart, "kernels, passing sources on": passing, "kernels, two-phase": phases}
    calls: Ways = {name: (step(way), nullcontext) for name, way in ways.items()}
    calls["torch's engine, two-phase"] = (step(phases), kernels.without_kernels)
    array = N * D * sources[0].element_size()
    # Two-phase at the least: the sources once, the mixtures in float32 and what is made of them, and the same backward.
    return timed(f"8 readers of 8 sources, D={D}", calls, settings, (n + 3 * Q + 2 * n + 3 * Q) * array, copy_rate(settings))


def copy_rate(settings: Settings) -> float:
    """Bytes per second that a copy moves, read and written."""
    numbers = settings.pick(2**30, 2**16)
    source, target = (torch.zeros(numbers, dtype=torch.bfloat16, device=settings.device) for _ in range(2))
    return 4 * numbers / (1e-6 * statistics.median(_microseconds(lambda: target.copy_(source), settings)))


def timed(what: str, calls: Ways, settings: Settings, least_bytes: float, copied: float) -> list[Row]:
    """A row per candidate; one that fails has its error in place of numbers."""
    rows: list[Row] = []
    for name, (call, scope) in calls.items():
        try:
            with scope():
                taken = _microseconds(call, settings)
        except Exception as failure:
            rows.append({"what": what, "candidate": name, "ok": False, "error": one_line(failure)})
            continue
        us = statistics.median(taken)
        rate = least_bytes / (1e-6 * us)
        row: Row = {"what": what, "candidate": name, "us": us, "min..max": f"{min(taken):.1f}..{max(taken):.1f}"}
        rows.append({**row, "GB/s of the least": rate / 1e9, "share of a copy": rate / copied})
    return rows


def _microseconds(call: Call, settings: Settings) -> list[float]:
    """Of one call, once per round: replays of a captured graph, so that launching from Python does not count."""
    call()
    if not settings.on_gpu:
        begin = time.perf_counter()
        call()
        return [1e6 * (time.perf_counter() - begin)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    graph.replay()
    found = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(1e3 * begin.elapsed_time(end) / CALLS)
    return found


def _inputs(settings: Settings, n: int, D: int, N: int) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """A query, sources in bfloat16, and their inverse rms, which are statistics."""
    query = (torch.randn(D, device=settings.device) / D**0.5).requires_grad_()
    sources = [torch.randn(1, N, D, device=settings.device).to(torch.bfloat16).requires_grad_() for _ in range(n)]
    return query, sources, [inverse_rms(v, EPS) for v in sources]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
