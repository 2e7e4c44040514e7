"""Causal softmax attention over a window that includes the query: one operator, for any axis.

Letters: B batch, H heads, G kv-heads, T queries, S keys, K key width. Query t has the position of key S - T + t.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from twoaxis.core.errors import ConfigError, problem
from twoaxis.ops.precision import Impl, check_impl, statistics_dtype

SMALLEST_CHUNK = 32
"""Smallest number of queries in a chunk of the windowed engine; shorter chunks lose more to overhead than they save."""


def local_attention(
    q: Float[Tensor, "B H T K"],
    k: Float[Tensor, "B G S K"],
    v: Float[Tensor, "B G S K"],
    *,
    window: int | None = None,
    documents: Int[Tensor, "B T"] | None = None,
    key_documents: Int[Tensor, "B S"] | None = None,
    sink: Float[Tensor, " H"] | None = None,
    impl: Impl = "fused",
) -> Float[Tensor, "B H T K"]:
    """Attends from each query to the last `window` keys of its own document, itself included.

    Equation: y_t = sum_j softmax_j(q_t^T k_j / sqrt(K)) v_j over j in [t-window+1, t] with key_documents[j] =
              documents[t]
    Source:   Residual Stream Duality, arXiv:2603.16039, Algorithm 1; window=None is full causal attention
    Shapes:   consecutive groups of H/G query heads share a kv-head; softmax in float32 (float64 for float64)
    Sink:     a score per query head that takes part in the softmax with a value of zero (gpt-oss, arXiv:2508.10925)
    Empty:    a query that sees no key, which is possible with key_documents only, gives 0 and has no gradient
    Cost:     flops 4*K per head and visible pair; the fused engine holds T*(chunk+window) booleans, never T*S

    Raises:
        ConfigError: a window below 1, heads not a multiple of kv-heads, more queries than keys, or documents of the queries
            without those of the keys.
    """
    check_impl(impl)
    _check(q, k, window)
    if (documents is None) != (key_documents is None):
        given = "documents alone" if key_documents is None else "key_documents alone"
        raise ConfigError(f"local_attention: got {given}; must be both or neither; give those of the queries and of the keys")
    if window is not None and window >= k.shape[2]:
        window = None
    if impl == "reference":
        return _reference(q, k, v, visible(q.shape[2], k.shape[2], window, documents, key_documents, q.device), sink)
    if sink is not None:
        wide = _with_sink(q, k, v, sink)
        return _fused(*wide, window, documents, key_documents, _Sink(1 / math.sqrt(q.shape[-1])))[..., : q.shape[-1]]
    return _fused(q, k, v, window, documents, key_documents, None)


class _Sink(NamedTuple):
    """Marks attention with a sink; `scale` is that of scores, which no longer follows from the width of heads."""

    scale: float


def _with_sink(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Adds a channel: the score of the sink in queries, zero in the keys of tokens."""
    score = (sink.to(q.dtype) * math.sqrt(q.shape[-1])).view(1, -1, 1, 1).expand(*q.shape[:3], 1)
    return torch.cat((q, score), dim=-1), F.pad(k, (0, 1)), F.pad(v, (0, 1))


def _sink_key(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Prepends the key of the sink, with a value of zero."""
    key = F.pad(torch.ones_like(k[..., :1, :1]), (k.shape[-1] - 1, 0))
    return torch.cat((key, k), dim=-2), F.pad(v, (0, 0, 1, 0))


def _fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None,
    documents: Tensor | None,
    key_documents: Tensor | None,
    sink: _Sink | None,
) -> Tensor:
    if window is not None:
        if q.shape[2] == 1:
            k, v = k[:, :, -window:], v[:, :, -window:]
            key_documents = None if key_documents is None else key_documents[:, -window:]
        else:
            return _windowed(q, k, v, window, documents, key_documents, sink)
    return _full(q, k, v, documents, key_documents, sink)


def visible(
    queries: int,
    keys: int,
    window: int | None,
    documents: Int[Tensor, "B T"] | None = None,
    key_documents: Int[Tensor, "B S"] | None = None,
    device: torch.device | None = None,
) -> Bool[Tensor, "_ 1 T S"]:
    """Returns which keys each query sees: the definition that every engine is tested against.

    Example:
        >>> visible(8, 8, 4).sum(-1).flatten().tolist()
        [1, 2, 3, 4, 4, 4, 4, 4]
    """
    age = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)
    mask = (age >= 0) if window is None else (age >= 0) & (age < window)
    if documents is None or key_documents is None:
        return mask[None, None]
    return mask & (documents[:, None, :, None] == key_documents[:, None, None, :])


def _check(q: Tensor, k: Tensor, window: int | None) -> None:
    # True is an int, and would be a window of one token.
    if window is not None and (isinstance(window, bool) or window < 1):
        raise ConfigError(problem("window", window, ">= 1, since it includes the query", "use window=1 for the token alone"))
    if q.shape[1] % k.shape[1]:
        raise ConfigError(problem("n_heads", q.shape[1], f"a multiple of n_kv_heads={k.shape[1]}", "change one of them"))
    if q.shape[2] > k.shape[2]:
        raise ConfigError(problem("queries", q.shape[2], f"at most the keys={k.shape[2]}", "pass the keys of these tokens too"))


def _reference(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sink: Tensor | None) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    dtype = statistics_dtype(q)
    k, v = (x.to(dtype).repeat_interleave(groups, dim=1) for x in (k, v))
    scores = (q.to(dtype) @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
    # A softmax over no key is NaN, and so is its gradient: such a row sees all keys, and its weights are then set to 0.
    empty = ~mask.any(dim=-1, keepdim=True)
    scores = scores.masked_fill(~(mask | empty), -torch.inf)
    if sink is not None:
        scores = torch.cat((scores, sink.to(dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : k.shape[2]].masked_fill(empty, 0.0)
    return (weights @ v).to(q.dtype)


def _full(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, key_documents: Tensor | None, sink: _Sink | None
) -> Tensor:
    options: dict[str, Any] = {"enable_gqa": q.shape[1] != k.shape[1], "scale": sink and sink.scale}
    alone = documents is None or key_documents is None
    plain = alone and (q.shape[2] == k.shape[2] or q.shape[2] == 1)
    mask = None if plain else visible(q.shape[2], k.shape[2], None, documents, key_documents, q.device)
    causal = plain and q.shape[2] > 1
    if sink is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, **options)
    k, v = _sink_key(k, v)
    if mask is not None:
        mask = F.pad(mask, (1, 0), value=True)
    if not causal:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)
    # A query is prepended for the position of the sink, so that no mask is needed.
    return F.scaled_dot_product_attention(F.pad(q, (0, 0, 1, 0)), k, v, is_causal=True, **options)[:, :, 1:]


class _Chunks(NamedTuple):
    """The chunks of equal length of T queries, each with the span of keys in its window."""

    n: int
    length: int
    span: int
    queries_added: int
    keys_added: int
    keys_skipped: int

    @staticmethod
    def plan(queries: int, keys: int, window: int) -> "_Chunks":
        length = min(max(window, SMALLEST_CHUNK), queries)
        n = -(-queries // length)
        before = keys - queries
        return _Chunks(
            n,
            length,
            span=length + window - 1,
            queries_added=n * length - queries,
            keys_added=max(0, window - 1 - before),
            keys_skipped=max(0, before - (window - 1)),
        )

    def spans(self, x: Tensor, dim: int) -> Tensor:
        """Cuts keys, or tensors laid out like keys, into one overlapping span per chunk, along a new axis."""
        overlap = self.span - self.length
        if overlap > self.length:
            return x.unfold(dim, self.span, self.length).movedim(-1, dim + 1)
        # Two plain cuts instead of unfold: each key lies in at most two spans, so the backward pass is one add.
        shape = (self.n, self.length)
        early = x.narrow(dim, 0, self.n * self.length).unflatten(dim, shape).narrow(dim + 1, 0, overlap)
        late = x.narrow(dim, overlap, self.n * self.length).unflatten(dim, shape)
        return torch.cat((early, late), dim=dim + 1)


def _windowed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    documents: Tensor | None,
    key_documents: Tensor | None,
    sink: _Sink | None,
) -> Tensor:
    B, H, T, K = q.shape
    G = k.shape[1]
    chunks = _Chunks.plan(T, k.shape[2], window)
    keys, values = (_align(x, chunks).reshape(B, G, -1, K) for x in (k, v))
    keys, values = (chunks.spans(x, 2).reshape(B * G, chunks.n, chunks.span, K) for x in (keys, values))
    queries = F.pad(q, (0, 0, 0, chunks.queries_added)) if chunks.queries_added else q
    # The query heads of one kv-head are stacked along the queries, so keys and values are never repeated.
    queries = queries.reshape(B, G, H // G, chunks.n, chunks.length, K).transpose(2, 3)
    queries = queries.reshape(B * G, chunks.n, (H // G) * chunks.length, K)
    mask = _chunk_mask(chunks, window, documents, key_documents, B, q.device)
    mask = mask.expand(-1, G, -1, -1, -1).reshape(-1, *mask.shape[2:]) if mask.shape[0] > 1 else mask[:, 0]
    mask = mask.repeat(1, 1, H // G, 1)
    if sink is not None:
        keys, values = _sink_key(keys, values)
        mask = F.pad(mask, (1, 0), value=True)
    y = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=sink and sink.scale)
    y = y.reshape(B, G, chunks.n, H // G, chunks.length, K).transpose(2, 3).reshape(B, H, -1, K)
    return y[:, :, :T]


def _align(x: Tensor, chunks: _Chunks) -> Tensor:
    """Drops keys that no query sees and pads to whole spans; padding is masked."""
    x = x[:, :, chunks.keys_skipped :]
    if not chunks.keys_added and not chunks.queries_added:
        return x
    return F.pad(x, (0, 0, chunks.keys_added, chunks.queries_added))


def _chunk_mask(
    chunks: _Chunks, window: int, documents: Tensor | None, key_documents: Tensor | None, batch: int, device: torch.device
) -> Tensor:
    """[1 or B, 1, n, length, span]: inside the window, not padding, same document."""
    row = torch.arange(chunks.length, device=device)[:, None]
    column = torch.arange(chunks.span, device=device)
    band = (column >= row) & (column - row < window)
    first = torch.arange(chunks.n, device=device)[:, None] * chunks.length
    exists = (first + column)[:, None] >= chunks.keys_added
    # A padded query sees its own padded key, so that no row of the softmax is empty.
    mask = (band & (exists | (column == row + window - 1)))[None, None]
    if documents is None or key_documents is None:
        return mask
    aligned = F.pad(key_documents[:, chunks.keys_skipped :], (chunks.keys_added, chunks.queries_added), value=-2)
    spans = chunks.spans(aligned[:, None], 2)
    own = F.pad(documents, (0, chunks.queries_added), value=-2).reshape(batch, 1, chunks.n, chunks.length)
    return mask & (own[..., None] == spans[..., None, :])
