"""Claim 6: what each placement carries, in bytes: along positions a bounded cache, along depth a state that every cut sends.

Letters: B batch, T position, D width, G kv-heads, K key width.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from twoaxis.claims.claim import PAPER, Claim, Evidence, EvidenceTable, Finding
from twoaxis.claims.toy_models import BLOCK, TOKENS, decoder, tokens
from twoaxis.core.cost import Shape
from twoaxis.core.key_value_cache import KeyValueCache
from twoaxis.core.layout import TokenLayout
from twoaxis.core.measure import distance, tensors
from twoaxis.depth import (
    AttentionResidualsConfig,
    DeepDeltaConfig,
    DepthAttentionConfig,
    DepthConfig,
    ResidualConfig,
)
from twoaxis.ledger.decoder_memory import decoder_cache_bytes, decoder_trace
from twoaxis.model import Decoder
from twoaxis.model.trace import trace

BYTES = 8
"""Of one float64 number."""
WINDOW, PROMPTS, BATCH = 5, (1, 4, 5, 17), 2
LAYERS = 4

SHORT_SWA: dict[str, Any] = {"kind": "short_swa", "n_heads": 2, "n_kv_heads": 1, "head_dim": 4, "window": WINDOW}

PLACEMENTS: tuple[tuple[str, DepthConfig, Sequence[dict[str, Any]]], ...] = (
    ("residual stream", ResidualConfig(), BLOCK),
    (f"ShortSWA, w = {WINDOW}", ResidualConfig(), (SHORT_SWA, *BLOCK)),
    ("depth attention, all states", DepthAttentionConfig(window=None, n_heads=2), BLOCK),
    ("depth attention, K = 3", DepthAttentionConfig(window=3, n_heads=2), BLOCK),
    ("attention residuals", AttentionResidualsConfig(), BLOCK),
    ("deep delta, d_v = 1", DeepDeltaConfig(), BLOCK),
    ("deep delta, d_v = 4", DeepDeltaConfig(value_channels=4, compressor="channel"), BLOCK),
)
"""Each with the depth mixer and the block that make it."""


def compute() -> Finding:
    """Measures caches, states and payloads of each placement, and holds each against what is declared and what is claimed."""
    found, rows, measured = Evidence(), [], {}
    for name, depth, block in PLACEMENTS:
        model = decoder(depth, block=block, n_layers=LAYERS)
        caches, payloads = cache_bytes(found, name, model), payload_bytes(found, name, model)
        measured[name] = (caches, payloads)
        plain = measured["residual stream"][0]
        added = " / ".join(str(own - other) for own, other in zip(caches, plain, strict=True))
        rows.append((name, added, " / ".join(str(payload) for payload in payloads)))
    judge(found, measured)
    lengths, cuts = " / ".join(map(str, PROMPTS)), " / ".join(map(str, range(1, LAYERS)))
    columns = (
        "placement",
        f"cache bytes added after {lengths} tokens, per sequence",
        f"payload bytes per token at the cut after block {cuts}",
    )
    return found.finding(
        "Caches, states and payloads are those of real decoders of four blocks in float64, width 8, and equal the declared "
        "numbers byte for byte.",
        "ShortSWA adds min(t, w-1) keys and values per layer, since the query brings its own, and nothing to what a cut sends.",
        "Depth reads add no cache but a state that grows with depth up to their window; a cut that leaves out any tensor of a "
        "state changes the logits. Deep Delta Learning sends d d_v numbers at any depth.",
        table=EvidenceTable(columns, tuple(rows)),
    )


def judge(found: Evidence, measured: dict[str, tuple[list[int], list[int]]]) -> None:
    """The asymmetry itself, in measured bytes."""
    plain_cache, plain_payload = measured["residual stream"]
    for name, depth, _ in PLACEMENTS:
        caches, payloads = measured[name]
        if name.startswith("ShortSWA"):
            entries = [min(t, WINDOW - 1) for t in PROMPTS]
            added = [own - other for own, other in zip(caches, plain_cache, strict=True)]
            width = SHORT_SWA["n_kv_heads"] * SHORT_SWA["head_dim"]
            found.exactly("cache added by ShortSWA", added, [LAYERS * 2 * n * width * BYTES for n in entries])
            found.exactly("payloads with ShortSWA", payloads, plain_payload)
            continue
        found.exactly(f"cache with {name}", caches, plain_cache)
        if isinstance(depth, DeepDeltaConfig):
            found.exactly(f"payloads with {name}", payloads, [depth.value_channels * p for p in plain_payload])
        elif not isinstance(depth, ResidualConfig):
            found.true(f"{name}: every payload exceeds the stream", all(p > plain_payload[0] for p in payloads))
            limit = isinstance(depth, DepthAttentionConfig) and depth.window is not None
            grows = all(a < b for a, b in itertools.pairwise(payloads))
            found.true(f"{name}: payloads grow with depth{' no further' if limit else ''}", grows is not limit)


@torch.no_grad()
def cache_bytes(found: Evidence, name: str, model: Decoder) -> list[int]:
    """Bytes that generation carries per sequence after prompts of each length; equal to those of the ledger."""
    sizes = []
    for length in PROMPTS:
        cache = model.new_cache()
        for token in tokens(BATCH, length).split(1, dim=1):
            _, cache = model(token, cache=cache)
        live = sum(_live_bytes(one) for block in cache.sublayers for one in block) + _live_bytes(cache.ends)
        expected = decoder_cache_bytes(model.config, Shape(BATCH, length, BYTES))
        found.exactly(f"cache of {name} after {length} tokens", live, expected)
        sizes.append(live // BATCH)
    return sizes


def _live_bytes(cache: Any) -> int:
    """Bytes of everything in a cache that later tokens may see."""
    if isinstance(cache, KeyValueCache):
        return cache.live_bytes
    if isinstance(cache, tuple):
        return sum(_live_bytes(part) for part in cache)
    if isinstance(cache, Tensor):
        return cache.numel() * cache.element_size()
    return sum(_live_bytes(part) for part in vars(cache).values()) if hasattr(cache, "__dict__") else 0


@torch.no_grad()
def payload_bytes(found: Evidence, name: str, model: Decoder) -> list[int]:
    """Bytes per token that cross each block boundary; the ledger counts them, they suffice, and no tensor can be left out."""
    text, length = tokens(), model.config.stack.block_lengths[0]
    run, sizes = trace(model, text), []
    expected = decoder_trace(model.config, Shape(BATCH, text.shape[1], BYTES))
    for cut in range(1, LAYERS):
        state = run.states[cut * length]
        payload = sum(t.numel() * t.element_size() for t in tensors(state))
        found.exactly(f"payload of {name} after block {cut}", payload, text.numel() * expected.state_bytes(cut * length))
        found.close(f"logits from the payload of {name}", _continue(model, _received(state), cut, text), run.logits, 0.0)
        for index in range(len(tensors(state))):
            moved = _continue(model, _without_tensor(state, index), cut, text)
            found.true(f"{name}: tensor {index} of the state is needed at cut {cut}", distance(moved, run.logits) > 1e-6)
        sizes.append(payload // text.numel())
    return sizes


def _received(state: Any) -> Any:
    """The state as the next stage receives it: the same numbers in new memory."""
    return tree_map(torch.clone, state)


def _without_tensor(state: Any, index: int) -> Any:
    """The state with one tensor sent as zeros."""
    place = itertools.count()
    return tree_map(lambda t: torch.zeros_like(t) if next(place) == index else t, state)


def _continue(model: Decoder, state: Any, cut: int, text: Tensor) -> Tensor:
    layout = TokenLayout.contiguous(TOKENS).of(text)
    for block in model.blocks[cut:]:
        state, _ = block(state, layout)
    return F.linear(model.norm(model.ends.leave(state)[0]), model.head_weight)


CLAIM = Claim(
    number=6,
    title="Operator duality is not systems symmetry",
    statement="In generation, ShortSWA adds a cache of bounded length per layer and nothing else. Depth reads add no token "
    "cache, but a state indexed by layers that grows with depth and crosses every pipeline cut. Deep Delta Learning carries "
    "d d_v numbers and no history.",
    source=f"{PAPER}, abstract and sections 2.4 and 2.6",
    tested="Bytes of real caches after prompts of several lengths, and of real states at every block boundary, against the "
    "declared costs; each state is sent to the rest of the model, whole and without each of its tensors.",
    compute=compute,
)
