"""The depth read in two phases: completed sources once for all queries of a block, later sources one at a time.

The completed sources exist before the first sublayer of a block. Phase 1 reads them for every query of the block; phase 2
merges the sources that came later, and equals the read of all sources at once.

Letters: B batch, T position, D width, H heads, S depth sources, Q queries.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from twoaxis.core.errors import ConfigError
from twoaxis.ops.depth_read import depth_scores, factors_are_alike, softmax_mix, weighted_sum, with_gradient
from twoaxis.ops.gpu import depth_read_operator, two_phase_operator
from twoaxis.ops.precision import Impl, outside_autocast, statistics_dtype
from twoaxis.ops.scores import row_product


class EarlyRead(NamedTuple):
    """The complete read of some of the sources; for a later merge it is one more source with a known score.

    Attributes:
        mixture: the read of these sources alone, in the precision of statistics.
        log_total: the log of the sum of exp(s_i), per head: the score of the mixture.
    """

    mixture: Float[Tensor, "B T D"]
    log_total: Float[Tensor, "B T H"]


@outside_autocast
def early_reads(
    sources: Sequence[Float[Tensor, "B T D"]],
    inverse_rms: Sequence[Float[Tensor, "B T"]],
    queries: Sequence[Float[Tensor, " D"]],
    n_heads: int = 1,
    impl: Impl = "fused",
) -> tuple[EarlyRead, ...]:
    """Reads the given sources for several queries in one pass: phase 1, one result per query.

    Kernels take two queries per pass, and in the backward pass one where a row has more than 4096 numbers.

    Equation: m = sum_i softmax_i(s) v_i,  l = log sum_i exp(s_i),  s_i = r_i * q^T v_i, per head
    Source:   Attention Residuals, arXiv:2603.15031, Algorithm 1, normalised, so that merging is a softmax over (l, s_late)
    Deviates: the maximum and the sum are stored as one number, their log-sum-exp
    Shapes:   all results in float32 (float64 for float64)
    Cost:     flops 4*D per source, query and token; saves the sources and 3*H numbers per source, query and token

    Raises:
        ConfigError: no source, or not one inverse rms per source.
    """
    return _early_reads(sources, inverse_rms, queries, n_heads, impl, passes=False)[0]


@outside_autocast
def passing_early_reads(
    sources: Sequence[Float[Tensor, "B T D"]],
    inverse_rms: Sequence[Float[Tensor, "B T"]],
    queries: Sequence[Float[Tensor, " D"]],
    n_heads: int = 1,
    impl: Impl = "fused",
) -> tuple[tuple[EarlyRead, ...], tuple[Float[Tensor, "B T D"], ...]]:
    """Computes `early_reads`, and passes the sources on to the next reader, as `passing_read` does.

    Raises:
        ConfigError: no source, or not one inverse rms per source.
    """
    return _early_reads(sources, inverse_rms, queries, n_heads, impl, passes=True)


def _early_reads(
    sources: Sequence[Tensor], inverse_rms: Sequence[Tensor], queries: Sequence[Tensor], n_heads: int, impl: Impl, passes: bool
) -> tuple[tuple[EarlyRead, ...], tuple[Tensor, ...]]:
    if not sources or len(sources) != len(inverse_rms):
        raise ConfigError(
            f"early_reads: got {len(sources)} sources and {len(inverse_rms)} inverse rms; give one of each per source"
        )
    dtype = statistics_dtype(sources[0])
    if impl == "fused" and factors_are_alike(sources, inverse_rms) and depth_read_operator.serves(sources, n_heads):
        stacked = torch.stack([query.to(dtype) for query in queries])
        mixtures, totals, passed = two_phase_operator.early_reads(sources, inverse_rms, stacked, n_heads, passes)
        return tuple(map(EarlyRead, mixtures, totals.unbind())), passed
    return _early_reads_in_torch(sources, inverse_rms, queries, n_heads), tuple(sources)


def _early_reads_in_torch(
    sources: Sequence[Tensor], inverse_rms: Sequence[Tensor], queries: Sequence[Tensor], n_heads: int
) -> tuple[EarlyRead, ...]:
    """Computes the early reads in plain PyTorch."""
    factors = [with_gradient(r, v) for v, r in zip(sources, inverse_rms, strict=True)]
    scores = [depth_scores(sources, factors, query, n_heads) for query in queries]
    return tuple(EarlyRead(weighted_sum(sources, torch.softmax(s, dim=0)), s.logsumexp(0)) for s in scores)


@outside_autocast
def late_read(
    early: EarlyRead,
    sources: Sequence[Float[Tensor, "B T D"]],
    inverse_rms: Sequence[Float[Tensor, "B T"]],
    query: Float[Tensor, " D"],
    impl: Impl = "fused",
) -> Float[Tensor, "B T D"]:
    """Merges later sources into an early read: phase 2, equal to the read of all at once.

    Equation: h = softmax over (l, s_late) of (m, v_late)
    Source:   Attention Residuals, arXiv:2603.15031, Algorithm 1
    Shapes:   the result in the dtype of the late sources
    Cost:     flops 4*D per late source and 2*D, per token
    """
    n_heads = early.log_total.shape[-1]
    if impl == "fused" and factors_are_alike(sources, inverse_rms) and depth_read_operator.serves(sources, n_heads):
        return depth_read_operator.read(sources, inverse_rms, query, n_heads, None, None, False, early=early)[0]
    if n_heads == 1:
        factors = (with_gradient(r, v) for v, r in zip(sources, inverse_rms, strict=True))
        rows = (row_product(v, query, impl) * r for v, r in zip(sources, factors, strict=True))
        scores = torch.stack(tuple(rows)).unsqueeze(-1)
    else:
        scores = depth_scores(sources, inverse_rms, query, n_heads)
    mixed = softmax_mix((early.mixture, *sources), torch.cat((early.log_total.unsqueeze(0), scores)))
    return mixed.to(sources[0].dtype)
