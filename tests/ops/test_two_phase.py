import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from twoaxis.core.errors import ConfigError
from twoaxis.ops.depth_read import depth_read, source_factor
from twoaxis.ops.norm import inverse_rms
from twoaxis.ops.precision import Impl
from twoaxis.ops.two_phase import complete, early_reads, late_read, merge, partial_reads

from .compare import assert_same, normal


def at_once(queries: Tensor, *sources: Tensor) -> Tensor:
    factors = [inverse_rms(v, 1e-6) for v in sources]
    return torch.stack([depth_read(sources, factors, query, "reference") for query in queries])


def in_phases(cut: int):  # type: ignore[no-untyped-def]
    def read(queries: Tensor, *sources: Tensor) -> Tensor:
        parts = [sources[:cut], *([v] for v in sources[cut:])]
        reads = [partial_reads(part, [inverse_rms(v, 1e-6) for v in part], queries) for part in parts]
        merged = reads[0]
        for later in reads[1:]:
            merged = tuple(merge(a, b) for a, b in zip(merged, later, strict=True))
        return torch.stack([complete(read) for read in merged])

    return read


@given(n=st.integers(2, 4), cut=st.integers(1, 4), Q=st.integers(1, 3), T=st.integers(1, 3), D=st.integers(1, 5))
@settings(max_examples=20)
def test_equals_the_read_at_once(n: int, cut: int, Q: int, T: int, D: int) -> None:
    sources = [normal(1, T, D, seed=i) * 5.0**i for i in range(n)]
    assert_same(in_phases(min(cut, n)), at_once, [normal(Q, D, seed=50), *sources])


def test_order_of_merging_does_not_matter() -> None:
    sources = [normal(1, 2, 4, seed=i) for i in range(3)]
    a, b, c = (partial_reads([v], [inverse_rms(v, 1e-6)], normal(1, 4, seed=9))[0] for v in sources)
    for one, other in zip(merge(merge(a, b), c), merge(c, merge(b, a)), strict=True):
        torch.testing.assert_close(one, other)


def test_scores_beyond_the_range_of_exp() -> None:
    v, r = torch.ones(1, 1, 2), torch.full((1, 1), 1e3)
    (low,), (high,) = (partial_reads([x], [r], torch.full((1, 2), q)) for x, q in ((v, -1.0), (2 * v, 1.0)))
    torch.testing.assert_close(complete(merge(low, high)), 2 * v)


def test_statistics_of_bfloat16_are_float32() -> None:
    v = normal(1, 2, 4, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        (read,) = partial_reads([v], [inverse_rms(v, 1e-6)], normal(1, 4, dtype=torch.bfloat16))
    assert {part.dtype for part in read} == {torch.float32}
    assert complete(read, torch.bfloat16).dtype == torch.bfloat16


def test_sources_without_their_rms() -> None:
    with pytest.raises(ConfigError, match="partial_reads: got 1 sources and 0 inverse rms"):
        partial_reads([torch.ones(1, 1, 2)], [], torch.ones(1, 2))


@pytest.mark.parametrize("impl", ["fused", "reference"])
@pytest.mark.parametrize("n_heads", [1, 2])
@pytest.mark.parametrize("late", [0, 1, 2])
def test_early_and_late_reads_equal_the_read_at_once(late: int, n_heads: int, impl: Impl) -> None:
    sources = [normal(2, 3, 4, seed=i) * 5.0**i for i in range(4)]
    cut = 4 - late

    def whole(first: Tensor, second: Tensor, *vs: Tensor) -> Tensor:
        factors = [source_factor(v, 1e-6, "reference") for v in vs]
        return torch.stack([depth_read(vs, factors, q, "reference", n_heads=n_heads) for q in (first, second)])

    def phases(first: Tensor, second: Tensor, *vs: Tensor) -> Tensor:
        factors = [source_factor(v, 1e-6, impl) for v in vs]
        reads = early_reads(vs[:cut], factors[:cut], (first, second), n_heads, impl)
        pairs = zip(reads, (first, second), strict=True)
        if not late:
            return torch.stack([read.mixture for read, _ in pairs])
        return torch.stack([late_read(read, vs[cut:], factors[cut:], query, impl) for read, query in pairs])

    assert_same(phases, whole, [normal(4, seed=50), normal(4, seed=51), *sources])


def test_early_reads_by_finite_differences_in_mixture_and_total() -> None:
    leaves = [t.requires_grad_() for t in (normal(4, seed=50), normal(1, 2, 4, seed=0), normal(1, 2, 4, seed=1))]

    def both(query: Tensor, *vs: Tensor) -> tuple[Tensor, Tensor]:
        (read,) = early_reads(vs, [source_factor(v, 1e-6) for v in vs], (query,), 2)
        return read.mixture, read.log_total

    assert torch.autograd.gradcheck(both, leaves)


def test_early_reads_without_their_rms() -> None:
    with pytest.raises(ConfigError, match="early_reads: got 1 sources and 0 inverse rms"):
        early_reads([torch.ones(1, 1, 2)], [], [torch.ones(2)])
