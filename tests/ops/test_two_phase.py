import pytest
import torch
from torch import Tensor

from twoaxis.core.errors import ConfigError
from twoaxis.ops.depth_read import depth_read, source_factor
from twoaxis.ops.norm import inverse_rms
from twoaxis.ops.precision import Impl
from twoaxis.ops.two_phase import early_reads, late_read

from .compare import assert_same, normal


def test_the_order_of_sources_does_not_matter() -> None:
    sources, query = [normal(1, 2, 4, seed=i) for i in range(3)], normal(4, seed=9)
    factors = [inverse_rms(v, 1e-6) for v in sources]
    (first,), (last,) = (early_reads(sources[part], factors[part], (query,)) for part in (slice(2), slice(1, 3)))
    ahead, behind = late_read(first, sources[2:], factors[2:], query), late_read(last, sources[:1], factors[:1], query)
    torch.testing.assert_close(ahead, behind)


@pytest.mark.parametrize("impl", ["fused", "reference"])
def test_scores_beyond_the_range_of_exp(impl: Impl) -> None:
    v, r = torch.ones(1, 1, 2), torch.full((1, 1), 1e3)
    for factor, expected in ((-1.0, v), (1.0, 2 * v)):
        query = torch.full((2,), factor)
        (early,) = early_reads([v], [r], (query,), impl=impl)
        torch.testing.assert_close(late_read(early, [2 * v], [r], query, impl), expected)


@pytest.mark.parametrize("impl", ["fused", "reference"])
def test_statistics_of_bfloat16_are_float32(impl: Impl) -> None:
    v = normal(1, 2, 4, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        (read,) = early_reads([v], [inverse_rms(v, 1e-6)], (normal(4, dtype=torch.bfloat16),), impl=impl)
    assert {part.dtype for part in read} == {torch.float32}


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
