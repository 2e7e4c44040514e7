"""The two-phase schedule in Triton's interpreter against the read of all sources at once in float64."""

import importlib.util
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.ops.compare import normal
from tests.ops.gpu.interpreted import assert_close, error, guarded
from twoaxis.ops.depth_read import depth_read, source_factor
from twoaxis.ops.gpu import launch
from twoaxis.ops.norm import inverse_rms
from twoaxis.ops.precision import Impl
from twoaxis.ops.two_phase import early_reads, late_read, passing_early_reads

pytestmark = pytest.mark.interpret

if importlib.util.find_spec("triton") is None:
    pytest.skip("without triton", allow_module_level=True)

EPS = 1e-6


def tensors(n: int, Q: int, D: int, dtype: torch.dtype = torch.float32, N: int = 5) -> list[Tensor]:
    """Queries, then sources, of which every second is 100 times as large."""
    queries = [normal(D, seed=70 + k, dtype=torch.float32) / D**0.5 for k in range(Q)]
    return [*queries, *(guarded((normal(1, N, D, seed=i) * 100.0 ** (i % 2)).to(dtype)) for i in range(n))]


def factors_of(sources: Sequence[Tensor], own: bool) -> list[Tensor]:
    return [source_factor(v, EPS, "reference") if own else inverse_rms(v, EPS) for v in sources]


def in_phases(given: Sequence[Tensor], Q: int, late: int, n_heads: int, own: bool, impl: Impl) -> list[Tensor]:
    """The reads of all queries, the last of them over the late sources too."""
    queries, sources = given[:Q], list(given[Q:])
    cut, factors = len(sources) - late, factors_of(given[Q:], own)
    if impl == "reference":
        return [
            depth_read(sources[: len(sources) if k == Q - 1 else cut], factors[: len(sources) if k == Q - 1 else cut], query,
                       impl, n_heads=n_heads)
            for k, query in enumerate(queries)
        ]  # fmt: skip
    early = early_reads(sources[:cut], factors[:cut], queries, n_heads, impl)
    mixed = [read.mixture for read in early]
    if late:
        mixed[-1] = late_read(early[-1], sources[cut:], factors[cut:], queries[-1], impl)
    return mixed


def results(given: Sequence[Tensor], *form: int | bool, wide: bool = False) -> list[Tensor]:
    """The reads one after the other, and the gradients of queries and sources."""
    leaves = [(one.double() if wide else one).detach().requires_grad_() for one in given]
    Q, late, n_heads, own = (int(part) for part in form)
    mixed = torch.stack(
        [one.double() for one in in_phases(leaves, Q, late, n_heads, bool(own), "reference" if wide else "fused")]
    )
    cotangent = normal(*mixed.shape, seed=99, dtype=torch.bfloat16).double()
    # A read of one source alone does not depend on its query.
    return [mixed.detach(), *torch.autograd.grad(mixed, leaves, cotangent, allow_unused=True, materialize_grads=True)]


@pytest.mark.parametrize(
    ("n", "Q", "D", "late", "n_heads", "own", "dtype"),
    [
        (3, 2, 48, 1, 1, True, torch.float32),
        (6, 3, 99, 2, 3, False, torch.float32),
        (2, 1, 100, 1, 1, False, torch.bfloat16),
        (5, 2, 96, 0, 4, True, torch.float16),
    ],
)
def test_values_and_gradients(n: int, Q: int, D: int, late: int, n_heads: int, own: bool, dtype: torch.dtype) -> None:
    given, form = tensors(n, Q, D, dtype), (Q, late, n_heads, own)
    assert_close(results(given, *form), results(given, *form, wide=True), dtype)


def test_queries_that_one_launch_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each launch of the backward pass adds to what the one before has written."""
    given, form = tensors(3, 3, 48), (3, 1, 1, True)
    whole = results(given, *form)
    blocks = launch.early_backward_blocks(64, 3, 4)._replace(queries=1, programs=2)
    monkeypatch.setattr(launch, "early_backward_blocks", lambda *shape: blocks)
    for ours, exact in zip(results(given, *form), whole, strict=True):
        assert error(ours, exact.double()) <= 1e-6


@pytest.mark.parametrize("N", [0, 1])
def test_few_rows(N: int) -> None:
    given, form = tensors(2, 2, 48, N=N), (2, 1, 1, True)
    assert_close(results(given, *form), results(given, *form, wide=True), torch.float32)


def test_gradients_of_other_readers_pass_through() -> None:
    """Two blocks read the same sources; the second takes them from the first."""
    given = tensors(3, 2, 48)

    def blocks(leaves: Sequence[Tensor], impl: Impl) -> Tensor:
        sources, total = tuple(leaves[2:]), torch.zeros((), dtype=leaves[0].dtype)
        for query in leaves[:2]:
            (read,), sources = passing_early_reads(sources, factors_of(sources, True), [query], 1, impl)
            total = total + (read.mixture / 100).sin() * read.log_total
        return total

    leaves = [one.detach().requires_grad_() for one in given]
    wide = [one.detach().double().requires_grad_() for one in given]
    got, want = blocks(leaves, "fused"), blocks(wide, "reference")
    cotangent = normal(*got.shape, seed=99)
    pairs = torch.autograd.grad(got, leaves, cotangent.float()), torch.autograd.grad(want, wide, cotangent)
    assert_close([got.detach(), *pairs[0]], [want.detach(), *pairs[1]], torch.float32)


def test_the_operators_keep_what_torch_asks_of_them() -> None:
    given = tensors(3, 2, 48, N=3)
    queries, sources, factors = torch.stack(given[:2]), given[2:], torch.ones(3, 1, 3)
    early = queries, sources, factors, 1
    torch.library.opcheck(torch.ops.twoaxis.early_read.default, early)
    mixtures, scores, log_totals = torch.ops.twoaxis.early_read(*early)
    saved = mixtures, log_totals, queries, sources, factors, scores, log_totals, sources[:1], 0b010, 0b110, True, 1
    torch.library.opcheck(torch.ops.twoaxis.early_read_backward.default, saved)
