"""Claim 7: ShortSWA runs in chunks as long as its window, and loads each block of keys at most twice.

Letters: B batch, H heads, G kv-heads, T position, K key width, w window.
"""

from collections import Counter

import torch
from jaxtyping import Float
from torch import Tensor

from twoaxis.claims.claim import Claim, Evidence, Finding, gradients_of
from twoaxis.core.key_value_cache import KeyValueCache
from twoaxis.core.probe import noise
from twoaxis.ops.local_attention import local_attention

CASES = ((1, 1), (7, 1), (3, 8), (16, 4), (19, 4), (33, 16), (40, 5), (260, 65))
"""T, w: less than a chunk, whole chunks, a ragged last chunk, and more than one chunk of the fused engine."""

BATCH, HEADS, KV_HEADS, KEY_WIDTH = 2, 4, 2, 6
GRADIENTS = 1e-11


class KeyBlocks:
    """Keys and values in blocks of w tokens, which counts every load of one.

    Attributes:
        loads: by block.
    """

    def __init__(self, k: Tensor, v: Tensor, window: int) -> None:
        self._blocks = list(zip(k.split(window, dim=2), v.split(window, dim=2), strict=True))
        self.loads: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._blocks)

    def load(self, index: int) -> tuple[Float[Tensor, "B G _ K"], Float[Tensor, "B G _ K"]]:
        """Returns the keys and values of one block."""
        self.loads[index] += 1
        return self._blocks[index]


def in_chunks(q: Float[Tensor, "B H T K"], blocks: KeyBlocks, window: int) -> Float[Tensor, "B H T K"]:
    """Runs each chunk of w queries over its own block of keys and the one before."""
    results = []
    for chunk, queries in enumerate(q.split(window, dim=2)):
        loaded = [blocks.load(index) for index in (chunk - 1, chunk) if index >= 0]
        k, v = (torch.cat(part, dim=2) for part in zip(*loaded, strict=True))
        results.append(local_attention(queries, k, v, window=window, impl="reference"))
    return torch.cat(results, dim=2)


def with_cache(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Runs the same chunks one call after another, each behind the cache of the calls before it."""
    cache, results = KeyValueCache(window), []
    for queries, keys, values in zip(*(x.split(window, dim=2) for x in (q, k, v)), strict=True):
        keys, values, cache = cache.extend(keys, values)
        results.append(local_attention(queries, keys, values, window=window, impl="reference"))
    return torch.cat(results, dim=2)


def compute() -> Finding:
    """Compares chunks with the whole, and counts loads."""
    found, most = Evidence(), 0
    for T, window in CASES:
        shapes = {"q": (BATCH, HEADS, T, KEY_WIDTH), "k": (BATCH, KV_HEADS, T, KEY_WIDTH), "v": (BATCH, KV_HEADS, T, KEY_WIDTH)}
        q, k, v = (noise(shape, f"claims/{name} {T}").requires_grad_() for name, shape in shapes.items())
        blocks = KeyBlocks(k, v, window)
        chunked = in_chunks(q, blocks, window)
        cotangent = noise(tuple(chunked.shape), f"claims/cotangent {T}")
        of_chunks = gradients_of([chunked], [cotangent], (q, k, v))
        for impl in ("reference", "fused"):
            whole = local_attention(q, k, v, window=window, impl=impl)
            found.close(f"chunks against the whole, {impl}", chunked, whole)
            found.all_close(f"gradients against {impl}", of_chunks, gradients_of([whole], [cotangent], (q, k, v)), GRADIENTS)
        found.close("chunks behind a cache", with_cache(q, k, v, window), chunked)
        # The last block has no chunk after it.
        expected = {index: 2 if index + 1 < len(blocks) else 1 for index in range(len(blocks))}
        found.exactly(f"loads of each block, T = {T}, w = {window}", dict(blocks.loads), expected)
        most = max(most, *blocks.loads.values())
        if window > 1 and len(blocks) > 1:
            alone = local_attention(*(x[:, :, window:] for x in (q, k, v)), window=window, impl="reference")
            found.apart(f"without the block before, T = {T}, w = {window}", alone, chunked[:, :, window:], 1e-6)
    found.true(f"no block is loaded more than twice; one is loaded {most} times", most <= 2)
    return found.finding(
        f"{len(CASES)} lengths and windows, ragged ones too: outputs within 1e-12 of both engines on the whole sequence, "
        "gradients within 1e-11.",
        "Every block of w keys is loaded twice, by its own chunk and by the next, and the last one once. Without the block "
        "before, results change.",
        "The same chunks one call after another behind the key-value cache give the same outputs.",
    )


CLAIM = Claim(
    number=7,
    title="ShortSWA runs in chunks",
    statement="Cut into chunks as long as the window, ShortSWA needs of the keys only the chunk's own block and the one "
    "before: the result is the same and each block is loaded at most twice.",
    source="arXiv:2603.16039, abstract and section 3",
    tested="A loop over chunks in the reference engine, which counts its loads, against both engines on the whole sequence: "
    "outputs and gradients.",
    compute=compute,
)
