"""Claim 7: ShortSWA runs in chunks, and the engine that runs loads each key at most twice.

Letters: B batch, H heads, G kv-heads, T position, K key width, w window.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from twoaxis.claims.benchmarks import kept_table
from twoaxis.claims.claim import PAPER, Claim, Evidence, EvidenceTable, Finding, gradients_of
from twoaxis.core.key_value_cache import KeyValueCache
from twoaxis.core.measure import noise
from twoaxis.ops.local_attention import SMALLEST_CHUNK, local_attention

CASES = ((7, 1), (16, 4), (40, 5), (70, 32), (260, 65), (512, 128), (700, 128))
"""T, w: a single chunk, chunks longer than the window or as long, whole and ragged last chunks."""

BATCH, HEADS, KV_HEADS, KEY_WIDTH = 2, 4, 2, 6
GRADIENTS = 1e-11

TIMES = "training, w=128: time at T=8192 / at T=2048"
"""The row of the stored benchmarks with the growth of time with length."""


class Loads(NamedTuple):
    """The inputs of the attention kernel in one call of the engine.

    Attributes:
        queries: rows of queries in each chunk.
        spans: positions of the keys of each chunk, without padding.
    """

    queries: int
    spans: tuple[tuple[int, ...], ...]

    @property
    def by_key(self) -> Counter[int]:
        """The number of loads of each key."""
        return Counter(key for span in self.spans for key in span)


class KeyRecorder(TorchFunctionMode):
    """Records the keys of every call of the attention kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            self.keys.append(args[1].detach())
        return func(*args, **(kwargs or {}))


def engine_loads(attend: Callable[..., Tensor], queries: int, keys: int, window: int) -> Loads:
    """Runs the engine on keys that contain their position, counted from 1, and finds the keys of each chunk."""
    q = torch.zeros(1, 1, queries, KEY_WIDTH, dtype=torch.float64)
    k = torch.arange(1, keys + 1, dtype=torch.float64).view(1, 1, keys, 1).expand(1, 1, keys, KEY_WIDTH)
    with KeyRecorder() as recorder:
        attend(q, k, k, window=window, impl="fused")
    (seen,) = recorder.keys
    spans = [tuple(int(key) - 1 for key in span if key > 0) for span in seen[..., 0].flatten(0, -2).tolist()]
    return Loads(-(-queries // len(spans)), tuple(spans))


def with_cache(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Runs chunks as long as the window in separate calls, with the cache of the calls before."""
    cache, results = KeyValueCache(window), []
    for queries, keys, values in zip(*(x.split(window, dim=2) for x in (q, k, v)), strict=True):
        keys, values, cache = cache.extend(keys, values)
        results.append(local_attention(queries, keys, values, window=window, impl="fused"))
    return torch.cat(results, dim=2)


def compute() -> Finding:
    """Compares the engine with the definition, and counts its loads."""
    found, rows = Evidence(), []
    for T, window in CASES:
        compare(found, T, window)
        loads = engine_loads(local_attention, T, T, window)
        most, length = max(loads.by_key.values()), max(window, SMALLEST_CHUNK)
        case = f"T = {T}, w = {window}"
        found.exactly(f"keys that are loaded, {case}", sorted(loads.by_key), list(range(T)))
        found.true(f"no key is loaded more than twice, {case}; one is loaded {most} times", most <= 2)
        for chunk, span in enumerate(loads.spans):
            # The chunk's own keys, and earlier keys visible to its first query.
            own = range(max(0, chunk * length - window + 1), min(T, (chunk + 1) * length))
            found.exactly(f"keys of chunk {chunk}, {case}", span, tuple(own))
        token = engine_loads(local_attention, 1, T, window)
        found.exactly(f"keys of one more token, {case}", token.spans, (tuple(range(max(0, T - window), T)),))
        average = sum(map(len, loads.spans)) / T
        rows.append(
            (str(T), str(window), str(len(loads.spans)), str(most), f"{average:.2f}", f"{(len(loads.spans) + 1) / 2:.2f}")
        )
    columns = ("T", "window", "chunks", "most loads of a key", "on average", "without a window")
    return found.finding(
        f"{len(CASES)} lengths and windows, ragged ones too, in the fused engine of ops.local_attention: each chunk is given "
        "its own keys and the w - 1 before them, so that no key is loaded more than twice; one more token in generation is "
        "given the last w keys.",
        "Outputs are within 1e-12 of the definition, gradients within 1e-11; without the keys before a chunk they change. The "
        "same chunks one call after another behind the key-value cache give the same outputs.",
        "Loads are the keys that the attention kernel is called with. Without a window a chunk would be given all keys so far.",
        growth(),
        table=EvidenceTable(columns, tuple(rows)),
    )


def compare(found: Evidence, T: int, window: int) -> None:
    """Compares the engine, and the engine with a cache, with the definition."""
    shapes = {"q": (BATCH, HEADS, T, KEY_WIDTH), "k": (BATCH, KV_HEADS, T, KEY_WIDTH), "v": (BATCH, KV_HEADS, T, KEY_WIDTH)}
    inputs = [noise(shape, f"claims/{name} {T}").requires_grad_() for name, shape in shapes.items()]
    whole = local_attention(*inputs, window=window, impl="reference")
    chunked = local_attention(*inputs, window=window, impl="fused")
    cotangent = noise(tuple(whole.shape), f"claims/cotangent {T}")
    found.close("chunks against the definition", chunked, whole)
    expected = gradients_of([whole], [cotangent], inputs)
    found.all_close("gradients against the definition", gradients_of([chunked], [cotangent], inputs), expected, GRADIENTS)
    q, k, v = inputs
    found.close("chunks behind a cache", with_cache(q, k, v, window), whole)
    length = max(window, SMALLEST_CHUNK)
    if length < T and window > 1:
        q, k, v = (x[:, :, length:] for x in inputs)
        alone = local_attention(q, k, v, window=window, impl="fused")
        found.apart(f"without the keys before, T = {T}, w = {window}", alone, whole[:, :, length:], 1e-6)


def growth() -> str:
    """States the growth of time with length from the stored benchmarks."""
    table = kept_table("Windowed attention")
    bounds = kept_table("Bounds", path=table.path) if table else None
    row = next((row for row in bounds.rows if row[0].startswith(TIMES)), None) if bounds else None
    if bounds is None or row is None:
        return "Time is measured in benchmarks alone; none is kept."
    measured = row[next(i for i, name in enumerate(bounds.columns) if name.startswith("measured"))]
    return f"Time is measured in benchmarks alone: {row[0]}: {measured} ({bounds.where}; {bounds.path})."


CLAIM = Claim(
    number=7,
    title="ShortSWA runs in chunks",
    statement="The window lies in the chunk that is loaded anyway and in the one before: the result is the same, and each key "
    "is loaded at most twice.",
    source=f"{PAPER}, abstract and section 2.4",
    tested="The engine that runs, ops.local_attention, on keys that hold their own position: which of them each call of the "
    "attention kernel is given. Its outputs and gradients against the definition.",
    compute=compute,
)
