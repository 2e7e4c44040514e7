"""Predictions of the planner beside what papers publish: counts, times and memory, and where they differ."""

from collections.abc import Callable
from functools import lru_cache

from twoaxis.planner.published.attention_residuals import attention_residuals
from twoaxis.planner.published.canon import canon
from twoaxis.planner.published.deep_cross_attention import deep_cross_attention
from twoaxis.planner.published.deep_delta import deep_delta
from twoaxis.planner.published.denseformer import denseformer
from twoaxis.planner.published.hyper_connections import hyper_connections, mhc
from twoaxis.planner.published.muddformer import muddformer
from twoaxis.planner.published.row import Published, Row

PAPERS: tuple[Callable[[], Published], ...] = (
    deep_delta,
    muddformer,
    denseformer,
    canon,
    hyper_connections,
    mhc,
    attention_residuals,
    deep_cross_attention,
)


@lru_cache(maxsize=1)
def published() -> tuple[Published, ...]:
    """All papers with their claims and our predictions, computed once."""
    return tuple(paper() for paper in PAPERS)


__all__ = ["PAPERS", "Published", "Row", "published"]
