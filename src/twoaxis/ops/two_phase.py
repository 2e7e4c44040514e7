"""The depth read in two phases: completed sources once for all queries of a block, later sources one at a time.

The completed sources exist before the first sublayer of a block. Phase 1 reads them for every query of the block; phase 2
merges the sources that came later, and equals the read of all sources at once.

Letters: B batch, T position, D width, H heads, S depth sources, Q queries.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from twoaxis.core.errors import ConfigError
from twoaxis.ops.depth_read import depth_scores, softmax_mix, with_gradient
from twoaxis.ops.gpu import depth_read_operator, two_phase_operator
from twoaxis.ops.mix import mixtures, products, query_gradients, raw_scores, source_gradients
from twoaxis.ops.precision import Impl, outside_autocast, runs_plain, statistics_dtype
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
    Cost:     flops 4*D per source, query and token; saves the sources and 2*H numbers per source, query and token

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
    if impl == "fused" and depth_read_operator.serves(sources, n_heads):
        stacked = torch.stack([query.to(dtype) for query in queries])
        mixtures, totals, passed = two_phase_operator.early_reads(sources, inverse_rms, stacked, n_heads, passes)
        return tuple(map(EarlyRead, mixtures, totals.unbind())), passed
    return _early_reads_in_torch(sources, inverse_rms, queries, n_heads, impl), tuple(sources)


def _early_reads_in_torch(
    sources: Sequence[Tensor], inverse_rms: Sequence[Tensor], queries: Sequence[Tensor], n_heads: int, impl: Impl
) -> tuple[EarlyRead, ...]:
    """Computes the early reads in their plain form or in torch's engine."""
    dtype = statistics_dtype(sources[0])
    if runs_plain(impl):
        scores = [depth_scores(sources, inverse_rms, query, n_heads) for query in queries]
        wide = [v.to(dtype) for v in sources]
        return tuple(EarlyRead(softmax_mix(wide, s, "reference"), s.logsumexp(0)) for s in scores)
    factors = [with_gradient(r, v) for v, r in zip(sources, inverse_rms, strict=True)]
    results = _EarlyReads.apply(torch.stack([query.to(dtype) for query in queries]), n_heads, *sources, *factors)
    return tuple(EarlyRead(*pair) for pair in zip(results[::2], results[1::2], strict=True))


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
    if impl == "fused" and depth_read_operator.serves(sources, n_heads):
        return depth_read_operator.read(sources, inverse_rms, query, n_heads, None, None, False, early=early)[0]
    if n_heads == 1:
        factors = (with_gradient(r, v) for v, r in zip(sources, inverse_rms, strict=True))
        rows = (row_product(v, query, impl) * r for v, r in zip(sources, factors, strict=True))
        scores = torch.stack(tuple(rows)).unsqueeze(-1)
    else:
        scores = depth_scores(sources, inverse_rms, query, n_heads)
    mixed = softmax_mix((early.mixture, *sources), torch.cat((early.log_total.unsqueeze(0), scores)), impl)
    return mixed.to(sources[0].dtype)


class _EarlyReads(torch.autograd.Function):
    """One pass over the sources in each direction, for any number of queries."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, n_heads: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        n = len(tensors) // 2
        sources, factors = tensors[:n], tensors[n:]
        scores = raw_scores(sources, queries, n_heads)
        logits = scores * torch.stack(factors).unsqueeze(1).unsqueeze(-1)
        totals = torch.logsumexp(logits, dim=0)
        weights = logits.sub_(totals).exp_()
        ctx.save_for_backward(queries, scores, weights, *tensors)
        mixed = mixtures(sources, weights)
        return tuple(part for mixture, total in zip(mixed, totals, strict=True) for part in (mixture, total.clone()))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        queries, scores, weights, *tensors = ctx.saved_tensors
        n = len(tensors) // 2
        sources, factors = tensors[:n], tensors[n:]
        grads, by_total = grad_outputs[::2], torch.stack(grad_outputs[1::2])
        by_weight = products(sources, grads, weights.shape[-1])
        # The mean of the weights' gradients, less the gradient of the log total.
        lost = (weights * by_weight).sum(0).sub_(by_total)
        by_logit = by_weight.sub_(lost).mul_(weights)
        by_factor = (by_logit * scores).sum((1, -1))
        by_score = by_logit.mul_(torch.stack(factors).unsqueeze(1).unsqueeze(-1))
        grad_sources = source_gradients(sources, grads, weights, queries, by_score)
        return query_gradients(sources, by_score, each=False), None, *grad_sources, *by_factor
