"""Claim 5: the cost of local mixing on either axis, by the operator, by the ledger and in running decoders.

Letters: T tokens, d width of all heads, w window along positions, K window along depth, L layers.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from twoaxis.claims.claim import PAPER, Claim, Evidence, EvidenceTable, Finding
from twoaxis.claims.toy_models import depth_attention_adds, short_swa_adds
from twoaxis.core.cost import Shape
from twoaxis.core.measure import product_flops
from twoaxis.core.position import LayerStack
from twoaxis.depth import DepthAttentionConfig
from twoaxis.ops.local_attention import local_attention
from twoaxis.sequence import ShortSWAConfig

HEADS = 2

SLOPE = 0.05
"""Tolerance of exponents, since the first w tokens, or K layers, see fewer keys than the rest."""

Count = Callable[..., int]
Grid = Mapping[str, Sequence[int]]

SEQUENCE_GRID: Grid = {"T": (512, 1024, 2048), "w": (4, 8, 16), "d": (16, 64)}
WINDOW_GRID: Grid = {"T": (8, 64), "K": (2, 4, 8), "L": (64, 128, 256), "d": (16, 64)}
FULL_GRID: Grid = {"T": (8, 64), "L": (16, 32, 64), "d": (16, 64)}

MODEL_SEQUENCE_GRID: Grid = {"T": (512, 1024), "w": (32, 64, 128), "d": (16, 64)}
MODEL_WINDOW_GRID: Grid = {"T": (4, 8), "K": (2, 4), "L": (24, 48)}
MODEL_FULL_GRID: Grid = {"T": (4, 8), "L": (16, 32), "d": (16, 32)}
"""Grids of running decoders. A shorter window would be masked in chunks of 32 queries."""


def counted_along_positions(T: int, w: int, d: int) -> int:
    """Multiply-adds of ShortSWA token by token, as in generation, so that no pair outside the window is computed."""
    # Every token with a full window costs the same.
    return sum(_one_query(t, w, d, rows=1) for t in range(1, w)) + (T - w + 1) * _one_query(T, w, d, rows=1)


def declared_along_positions(T: int, w: int, d: int) -> int:
    """Declared FLOPs of scores and values of ShortSWA."""
    site = LayerStack(d, 1e-6, (1,)).sites[0]
    return ShortSWAConfig(window=w, n_heads=HEADS, n_kv_heads=HEADS).cost(site, Shape(1, T)).pair_flops


def counted_along_depth(T: int, L: int, d: int, K: int | None = None) -> int:
    """Multiply-adds of the same operator layer by layer, with tokens as rows of the batch."""
    seen = [layer + 1 if K is None else min(layer + 1, K) for layer in range(L)]
    return sum(seen.count(n) * _one_query(n, n, d, rows=T) for n in set(seen))


def declared_along_depth(T: int, L: int, d: int, K: int | None = None) -> int:
    """Declared FLOPs of scores and values of the depth mixer `depth_attention`."""
    shape, stack = Shape(1, T), LayerStack(d, 1e-6, (1,) * L)
    reads, alone = (DepthAttentionConfig(window=window, n_heads=HEADS) for window in (K, 1))
    # Subtracts costs that do not grow with the window, by a read of the own state alone, which has one source.
    flops = [sum(config.cost(site, shape).elementwise_flops for site in stack.sites) for config in (reads, alone)]
    return flops[0] - flops[1] + L * _one_query(1, 1, d, rows=T)


@lru_cache(maxsize=1024)
def _one_query(keys: int, window: int, d: int, rows: int) -> int:
    """Multiply-adds of one query per row, counted by torch on the meta device."""
    q, k, v = (torch.empty(rows, HEADS, n, d // HEADS, device="meta") for n in (1, keys, keys))
    with sdpa_kernel(SDPBackend.MATH):
        return product_flops(lambda: local_attention(q, k, v, window=window))[0]


def points(grid: Grid) -> list[dict[str, int]]:
    """All combinations of the sizes of a grid."""
    return [dict(zip(grid, sizes, strict=True)) for sizes in itertools.product(*grid.values())]


def exponents(counts: Sequence[int], grid: Grid) -> dict[str, float]:
    """Fits a power of each size to counts at the points of a grid, by least squares of logarithms."""
    rows = [[1.0, *(math.log(size) for size in point.values())] for point in points(grid)]
    logs = [[math.log(count)] for count in counts]
    fitted = torch.linalg.lstsq(torch.tensor(rows, dtype=torch.float64), torch.tensor(logs, dtype=torch.float64)).solution
    return dict(zip(grid, fitted.flatten()[1:].tolist(), strict=True))


CASES: tuple[tuple[str, Count, Count, Grid, dict[str, int]], ...] = (
    ("ShortSWA", counted_along_positions, declared_along_positions, SEQUENCE_GRID, {"T": 1, "w": 1, "d": 1}),
    ("depth window", counted_along_depth, declared_along_depth, WINDOW_GRID, {"T": 1, "K": 1, "L": 1, "d": 1}),
    ("full depth", counted_along_depth, declared_along_depth, FULL_GRID, {"T": 1, "L": 2, "d": 1}),
)


RUNNING = (
    ("ShortSWA", short_swa_adds, MODEL_SEQUENCE_GRID, {"T": 1, "w": 1, "d": 1}, {"T": 1, "w": 0, "d": 2}),
    (
        "depth window",
        lambda **sizes: depth_attention_adds(d=16, **sizes),
        MODEL_WINDOW_GRID,
        {"T": 1, "K": 1, "L": 1},
        {"T": 1, "K": 0, "L": 1},
    ),
    ("full depth", depth_attention_adds, MODEL_FULL_GRID, {"T": 1, "L": 2, "d": 1}, {"T": 1, "L": 1, "d": 2}),
)
"""The additions of each placement to a plain decoder, its grid, and the powers of scores and values and of projections."""


def compute() -> Finding:
    """Compares counted and declared operations over the grids, counts running decoders, and fits all exponents."""
    found, rows = Evidence(), []
    # Points of a grid share counts, of the operator as it is now.
    _one_query.cache_clear()
    for name, counted, declared, grid, expected in CASES:
        counts = {
            what: [count(**point) for point in points(grid)] for what, count in (("operator", counted), ("ledger", declared))
        }
        for point, count, charge in zip(points(grid), *counts.values(), strict=True):
            found.exactly(f"{name} at {point}, counted against declared", count, charge)
        rows += [fit(found, f"{name}, scores and values", what, numbers, grid, expected) for what, numbers in counts.items()]
    for name, adds, grid, of_mixing, of_projections in RUNNING:
        counts = [adds(**point) for point in points(grid)]
        mixing, projections = (list(part) for part in zip(*counts, strict=True))
        rows.append(fit(found, f"{name}, scores and values", "decoder", mixing, grid, of_mixing))
        rows.append(fit(found, f"{name}, projections", "decoder", projections, grid, of_projections))
    return found.finding(
        "Scores and values: counted by torch's flop counter on the operator as it runs one query at a time, and declared by "
        "the mixers' costs, the same number at every point of the grids.",
        "Running decoders: what the mixer adds to the plain decoder in one forward pass, products of matrices by torch's flop "
        "counter, products on heads by a dispatch mode. Projections stand apart: they cost T d^2 per read on either axis, "
        "whatever the window.",
        "Exponents are fitted by least squares; they miss whole numbers by at most 0.05 because the first tokens, or layers, "
        "see fewer keys than their window holds, and because a chunk computes pairs that it masks.",
        table=EvidenceTable(("what", "law", "counted in", "fitted exponents"), tuple(rows)),
        bound=f"{SLOPE} in every exponent",
    )


def fit(
    found: Evidence, what: str, how: str, counts: Sequence[int], grid: Grid, expected: Mapping[str, int]
) -> tuple[str, str, str, str]:
    """Tests the exponents of counts, and returns the row of evidence."""
    slopes = exponents(counts, grid)
    for size, slope in slopes.items():
        close = abs(slope - expected[size]) <= SLOPE
        found.true(f"{what}, {how}: the power of {size} is {expected[size]}; it is {slope:.2f}", close)
    law = " ".join(size if power == 1 else f"{size}^{power}" for size, power in expected.items() if power)
    return what, law, how, ", ".join(f"{size} {round(slope, 2) + 0.0:.2f}" for size, slope in slopes.items())


CLAIM = Claim(
    number=5,
    title="Complexity of local mixing on either axis",
    statement="Mixing along positions over a window costs of the order of T w d per layer, along depth over a window T K d per "
    "block and T K L d in all, and over all earlier blocks T L^2 d; for scores and values.",
    source=f"{PAPER}, section 2.6",
    tested="Floating-point operations of the operator, of the ledger and of running decoders, over grids of sizes; exponents "
    "fitted to all.",
    compute=compute,
)
