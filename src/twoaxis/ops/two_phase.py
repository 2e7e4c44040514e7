"""The depth read in two phases: completed sources once for all queries of a block, later sources one at a time.

A decoder or a pipeline stage holds the completed sources long before the running one exists. Phase 1 reads them for
every query of the block; phase 2 merges what came later, and equals the read of all sources at once.

Letters: B batch, T position, D width, Q queries.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from twoaxis.core.errors import ConfigError
from twoaxis.ops.depth_read import with_gradient
from twoaxis.ops.precision import outside_autocast, statistics_dtype


class PartialRead(NamedTuple):
    """The softmax read of some of the sources, before its division; the rest can be merged in later.

    Attributes:
        mixture: sum_i exp(s_i - maximum) * v_i.
        maximum: the largest score s_i, dimensionless.
        total: sum_i exp(s_i - maximum), at least 1 since the largest term is 1.
    """

    mixture: Float[Tensor, "B T D"]
    maximum: Float[Tensor, "B T"]
    total: Float[Tensor, "B T"]


@outside_autocast
def partial_reads(
    sources: Sequence[Float[Tensor, "B T D"]], inverse_rms: Sequence[Float[Tensor, "B T"]], queries: Float[Tensor, "Q D"]
) -> tuple[PartialRead, ...]:
    """Reads the sources at hand for several queries at once: phase 1, or one later source for phase 2.

    Equation: s_i = r_i * q^T v_i,  m = max_i s_i,  o = sum_i exp(s_i - m) v_i,  l = sum_i exp(s_i - m)
    Source:   Attention Residuals, arXiv:2603.15031, Algorithm 1
    Shapes:   all results in float32 (float64 for float64)
    Cost:     flops 4*D per source, query and token; each source is read once per call for the scores of all queries

    Returns:
        One partial read per query, in order.

    Raises:
        ConfigError: no source, or not one inverse rms per source.
    """
    if not sources or len(sources) != len(inverse_rms):
        raise ConfigError(
            f"partial_reads: got {len(sources)} sources and {len(inverse_rms)} inverse rms; give one of each per source"
        )
    dtype = statistics_dtype(sources[0])
    wide_queries = queries.to(dtype).T
    factors = (with_gradient(r, v).unsqueeze(-1) for v, r in zip(sources, inverse_rms, strict=True))
    scores = torch.stack([(v.to(dtype) @ wide_queries) * r for v, r in zip(sources, factors, strict=True)])
    # The result does not depend on the maximum, so no gradient has to pass through it.
    maximum = scores.detach().amax(0)
    weights = torch.exp(scores - maximum)
    total = weights.sum(0)
    return tuple(
        PartialRead(_weighted_sum(sources, weights[..., index]), maximum[..., index], total[..., index])
        for index in range(queries.shape[0])
    )


@outside_autocast
def merge(first: PartialRead, second: PartialRead) -> PartialRead:
    """The partial read of the sources of both, by the online softmax: phase 2.

    Equation: m = max(m_1, m_2),  o = e^(m_1 - m) o_1 + e^(m_2 - m) o_2,  l = e^(m_1 - m) l_1 + e^(m_2 - m) l_2
    Source:   Attention Residuals, arXiv:2603.15031, Algorithm 1
    Cost:     flops 3*D per token

    Example:
        >>> v, r = torch.tensor([[[1.0, 3.0]]]), torch.ones(1, 1)
        >>> (early,), (late,) = (partial_reads([x], [r], torch.zeros(1, 2)) for x in (v, 3 * v))
        >>> complete(merge(early, late))
        tensor([[[2., 6.]]])
    """
    maximum = torch.maximum(first.maximum, second.maximum)
    a, b = torch.exp(first.maximum - maximum), torch.exp(second.maximum - maximum)
    mixture = torch.addcmul(a.unsqueeze(-1) * first.mixture, b.unsqueeze(-1), second.mixture)
    return PartialRead(mixture, maximum, a * first.total + b * second.total)


def complete(read: PartialRead, dtype: torch.dtype | None = None) -> Float[Tensor, "B T D"]:
    """The finished read o / l, in the given dtype or in that of the statistics."""
    return (read.mixture / read.total.unsqueeze(-1)).to(dtype or read.mixture.dtype)


def _weighted_sum(sources: Sequence[Tensor], weights: Tensor) -> Tensor:
    mixed = weights[0].unsqueeze(-1) * sources[0]
    for v, weight in zip(sources[1:], weights[1:], strict=True):
        mixed = torch.addcmul(mixed, weight.unsqueeze(-1), v.to(mixed.dtype))
    return mixed
