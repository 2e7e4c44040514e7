"""Predictions of the planner beside what papers publish: counts, times and memory, and where they differ."""

from collections.abc import Callable
from functools import lru_cache

from planner.published.attention_residuals import attention_residuals
from planner.published.canon import canon
from planner.published.deep_cross_attention import deep_cross_attention
from planner.published.deep_delta import deep_delta
from planner.published.denseformer import denseformer
from planner.published.hyper_connections import hyper_connections, mhc
from planner.published.muddformer import muddformer
from planner.published.row import Published, Row

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
