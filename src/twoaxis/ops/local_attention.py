"""Causal softmax attention over a window that includes the query: one operator, for any axis.

Letters: B batch, H heads, G kv-heads, T queries, S keys, K key width, V value width. Query t has the position of key S - T + t.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from twoaxis.core.errors import ConfigError, problem
from twoaxis.ops.precision import BY_REFERENCE, Impl, check_impl, outside_autocast, refuse_second_gradients, statistics_dtype

SMALLEST_CHUNK = 32
"""Smallest number of queries in a chunk of the windowed engine; shorter chunks lose more to overhead than they save."""


Beside = tuple[Tensor, ...]
"""One more key for each query: its score [B H T] and value [B H T V], and a weight [1] of the change that it makes if any."""


def local_attention(
    q: Float[Tensor, "B H T K"],
    k: Float[Tensor, "B G S K"],
    v: Float[Tensor, "B G S V"],
    *,
    window: int | None = None,
    documents: Int[Tensor, "_ T"] | None = None,
    key_documents: Int[Tensor, "_ S"] | None = None,
    sink: Float[Tensor, " H"] | Float[Tensor, "B H T"] | None = None,
    beside: Beside = (),
    impl: Impl = "fused",
) -> Float[Tensor, "B H T V"]:
    """Attends from each query to the last `window` keys of its own document, itself included.

    Equation: y_t = sum_j softmax_j(q_t^T k_j / sqrt(K)) v_j over j in [t-window+1, t] with key_documents[j] =
              documents[t]
    Source:   Residual Stream Duality, arXiv:2603.16039, Algorithm 1; window=None is full causal attention
    Shapes:   consecutive groups of H/G query heads share a kv-head; softmax in float32 (float64 for float64)
    Sink:     a score per query head, or per query and head, that takes part in the softmax with a value of zero (gpt-oss,
              arXiv:2508.10925); the result is that without it times sigmoid(logsumexp of the scores - sink)
    Beside:   takes part in the same softmax: y = (e^l y_0 + e^s value) / (e^l + e^s), with y_0 the attention to tokens and l
              the logarithm of its sum; a weight g gives y_0 + g (y - y_0). Several keys are given as one: the score is the
              logarithm of their sum of exponentials, the value their mean weighted by these
    Empty:    a query that sees no key, which is possible with key_documents only, gives 0 and has no gradient; one with a key
              beside sees that alone
    Cost:     flops 2*(K+V) per head and visible pair; the fused engine holds T*(chunk+window) booleans, never T*S, but with a
              key beside on another device than a CPU the T*S scores

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
    # No other device has an operator of known form that returns the logarithms of its sums; a CPU's needs a query.
    if impl == "reference" or (beside and (q.device.type not in ("cpu", "meta") or not q.shape[2])):
        mask = visible(q.shape[2], k.shape[2], window, documents, key_documents, q.device)
        return _reference(q, k, v, mask, sink, beside)
    keys = _Keys(documents, key_documents, beside, None if sink is None else 1 / math.sqrt(q.shape[-1]))
    if sink is None:
        return _fused(q, k, v, window, keys)
    if beside:
        score, value, *weight = beside
        keys = keys._replace(beside=(score, F.pad(value, (0, 1)), *weight))
    return _fused(*_with_sink(q, k, v, sink), window, keys)[..., : v.shape[-1]]


class _Keys(NamedTuple):
    """What a query sees.

    Attributes:
        documents: of the queries.
        key_documents: of the keys.
        beside: one more key for each query.
        sink_scale: marks attention with a sink: the scale of scores, which no longer follows from the width of heads.
    """

    documents: Tensor | None
    key_documents: Tensor | None
    beside: Beside
    sink_scale: float | None


def _with_sink(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Adds a channel: the score of the sink in queries, zero in the keys of tokens."""
    score = _per_query(sink.to(q.dtype) * math.sqrt(q.shape[-1]), q)
    return torch.cat((q, score), dim=-1), F.pad(k, (0, 1)), F.pad(v, (0, 1))


def _per_query(sink: Tensor, q: Tensor) -> Float[Tensor, "B H T 1"]:
    return (sink.view(1, -1, 1) if sink.ndim == 1 else sink).unsqueeze(-1).expand(*q.shape[:3], 1)


def _sink_key(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Prepends the key of the sink, with a value of zero."""
    key = F.pad(torch.ones_like(k[..., :1, :1]), (k.shape[-1] - 1, 0))
    return torch.cat((key, k), dim=-2), F.pad(v, (0, 0, 1, 0))


def _fused(q: Tensor, k: Tensor, v: Tensor, window: int | None, keys: _Keys) -> Tensor:
    if window is not None:
        if q.shape[2] > 1:
            return _windowed(q, k, v, window, keys)
        k, v = k[:, :, -window:], v[:, :, -window:]
        if keys.key_documents is not None:
            keys = keys._replace(key_documents=keys.key_documents[:, -window:])
    return _full(q, k, v, keys)


def visible(
    queries: int,
    keys: int,
    window: int | None,
    documents: Int[Tensor, "_ T"] | None = None,
    key_documents: Int[Tensor, "_ S"] | None = None,
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


@outside_autocast
def _reference(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sink: Tensor | None, beside: Beside, scale: float | None = None
) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    dtype = statistics_dtype(q)
    k, v = (x.to(dtype).repeat_interleave(groups, dim=1) for x in (k, v))
    scores = (q.to(dtype) @ k.transpose(-1, -2)) * (scale or 1 / math.sqrt(q.shape[-1]))
    # A softmax over no key is NaN, and so is its gradient: such a row sees all keys, and its weights are then set to 0.
    empty = ~mask.any(dim=-1, keepdim=True)
    scores = scores.masked_fill(~(mask | empty), -torch.inf)
    if sink is not None:
        scores = torch.cat((scores, _per_query(sink.to(dtype), q)), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : k.shape[2]].masked_fill(empty, 0.0)
    y = weights @ v
    if not beside:
        return y.to(q.dtype)
    score, value, *weight = (x.to(dtype) for x in beside)
    log_sum = torch.logsumexp(scores[..., : k.shape[2]], dim=-1).masked_fill(empty.squeeze(-1), -torch.inf)
    if sink is not None:
        log_sum = torch.logaddexp(log_sum, scores[..., -1])
    share = torch.sigmoid(score - log_sum).unsqueeze(-1)
    return torch.lerp(y, value, share * weight[0] if weight else share).to(q.dtype)


def _full(q: Tensor, k: Tensor, v: Tensor, keys: _Keys) -> Tensor:
    documents, key_documents, beside, scale = keys
    alone = documents is None or key_documents is None
    plain = alone and (q.shape[2] == k.shape[2] or q.shape[2] == 1)
    mask = None if plain else visible(q.shape[2], k.shape[2], None, documents, key_documents, q.device)
    causal = plain and q.shape[2] > 1
    if scale is None:
        return _attention(q, k, v, mask, causal, scale, beside)
    k, v = _sink_key(k, v)
    if mask is not None:
        mask = F.pad(mask, (1, 0), value=True)
    if not causal:
        return _attention(q, k, v, mask, causal, scale, beside)
    # A query is prepended for the position of the sink, so that no mask is needed.
    rows = _Rows(lambda x: x[:, :, 1:], lambda x: F.pad(x, (*(0, 0) * (x.ndim - 3), 1, 0)))
    return _attention(rows.of(q), k, v, None, True, scale, beside, rows)


class _Rows(NamedTuple):
    """The order in which an engine computes the queries.

    Attributes:
        tokens: from that order to [B H T *each].
        of: back to it, with zeros for queries that are added.
    """

    tokens: Callable[[Tensor], Tensor]
    of: Callable[[Tensor], Tensor]


_AS_GIVEN = _Rows(lambda x: x, lambda x: x)


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    beside: Beside,
    rows: _Rows = _AS_GIVEN,
) -> Tensor:
    """Attention of queries in this order: [B H T V]."""
    if not beside and q.shape[-1] != v.shape[-1]:
        # PyTorch's own has no kernel for other values on a CPU, and gives them the wrong shape without memory.
        if mask is None:
            mask = visible(q.shape[2], k.shape[2], None, device=q.device)
        return rows.tokens(_reference(q, k, v, mask, None, (), scale))
    if not beside:
        options: dict[str, Any] = {"enable_gqa": q.shape[1] != k.shape[1]} if q.shape[1] != k.shape[1] else {}
        return rows.tokens(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, **options))
    return _attend_beside(q, k, v, mask, _Call(causal, scale, rows), *beside)


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


def _windowed(q: Tensor, k: Tensor, v: Tensor, window: int, keys: _Keys) -> Tensor:
    documents, key_documents, beside, scale = keys
    (B, H, T, _), G = q.shape, k.shape[1]
    chunks = _Chunks.plan(T, k.shape[2], window)
    k, v = (chunks.spans(_align(x, chunks), 2).reshape(B * G, chunks.n, chunks.span, x.shape[-1]) for x in (k, v))

    def tokens(x: Tensor) -> Tensor:
        each = x.shape[3:]
        x = x.reshape(B, G, chunks.n, H // G, chunks.length, *each).transpose(2, 3)
        return x.reshape(B, H, chunks.n * chunks.length, *each)[:, :, :T]

    def rows(x: Tensor) -> Tensor:
        # The query heads of one kv-head are stacked along the queries, so keys and values are never repeated.
        each = x.shape[3:]
        x = F.pad(x, (*(0, 0) * len(each), 0, chunks.queries_added)) if chunks.queries_added else x
        x = x.reshape(B, G, H // G, chunks.n, chunks.length, *each).transpose(2, 3)
        return x.reshape(B * G, chunks.n, (H // G) * chunks.length, *each)

    mask = _chunk_mask(chunks, window, documents, key_documents, q.device)
    mask = mask.expand(-1, G, -1, -1, -1).reshape(-1, *mask.shape[2:]) if mask.shape[0] > 1 else mask[:, 0]
    mask = mask.repeat(1, 1, H // G, 1)
    if scale is not None:
        k, v = _sink_key(k, v)
        mask = F.pad(mask, (1, 0), value=True)
    return _attention(rows(q), k, v, mask, False, scale, beside, _Rows(tokens, rows))


def _align(x: Tensor, chunks: _Chunks) -> Tensor:
    """Drops keys that no query sees and pads to whole spans; padding is masked."""
    x = x[:, :, chunks.keys_skipped :]
    if not chunks.keys_added and not chunks.queries_added:
        return x
    return F.pad(x, (0, 0, chunks.keys_added, chunks.queries_added))


def _chunk_mask(
    chunks: _Chunks, window: int, documents: Tensor | None, key_documents: Tensor | None, device: torch.device
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
    own = F.pad(documents, (0, chunks.queries_added), value=-2).reshape(-1, 1, chunks.n, chunks.length)
    return mask & (own[..., None] == spans[..., None, :])


class _Call(NamedTuple):
    """Options of one pass of the engine."""

    causal: bool
    scale: float | None
    rows: _Rows


@outside_autocast
def _attend_beside(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    call: _Call,
    score: Tensor,
    value: Tensor,
    weight: Tensor | None = None,
) -> Tensor:
    return _AttentionBeside.apply(q, k.to(q.dtype), v.to(q.dtype), score, value, weight, mask, call)


class _AttentionBeside(torch.autograd.Function):
    """Attention with one more key for each query.

    The backward pass of attention takes its output and the logarithms of its sums. Given those of the joint softmax, it
    computes the gradients of its own part of that.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        score: Tensor,
        value: Tensor,
        weight: Tensor | None,
        mask: Tensor | None,
        call: _Call,
    ) -> Tensor:
        added = None if mask is None else torch.where(mask, 0.0, -torch.inf).to(q.dtype)
        y, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, call.causal, attn_mask=added, scale=call.scale
        )
        if mask is not None:
            # The engine returns 0 where a query sees no key.
            log_sum = log_sum.masked_fill(~mask.any(dim=-1), -torch.inf)
        dtype = statistics_dtype(q)
        y, log_sum = call.rows.tokens(y), call.rows.tokens(log_sum).to(dtype)
        share = torch.sigmoid(score - log_sum)
        joint = torch.lerp(y.to(dtype), value.to(dtype), (share if weight is None else share * weight.to(dtype)).unsqueeze(-1))
        joint = joint.to(q.dtype)
        kept = (joint, torch.logaddexp(score, log_sum)) if weight is None else (y, log_sum)
        ctx.call = call
        ctx.save_for_backward(q, k, v, score, value, weight, added, *kept)
        return joint

    @staticmethod
    @outside_autocast
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """With p the share of the key and u = value - y: dscore = p(1-p) g dy^T u, dvalue = p g dy, dg = p dy^T u."""
        refuse_second_gradients("local_attention with a key beside", BY_REFERENCE)
        q, k, v, score, value, weight, added, y, log_sum = ctx.saved_tensors
        grad, dtype, call = grad_outputs[0], statistics_dtype(q), ctx.call
        # From what is kept of y: the joint output without a weight, else the attention to tokens alone.
        apart = value.to(dtype) - y
        along = (grad.to(dtype) * apart).sum(-1)
        grad_weight, given = None, grad
        if weight is None:
            share = torch.exp(score - log_sum)
            grad_score = share * along
        else:
            part = torch.sigmoid(score - log_sum)
            share, rest = part * weight.to(dtype), part * (1 - part) * weight.to(dtype)
            grad_score, grad_weight = rest * along, (part * along).sum().reshape(1).to(weight.dtype)
            left = 1 - share
            # Where nothing is left, or no token is seen, no gradient reaches the attention to tokens.
            left = torch.where(left == 0, torch.finfo(dtype).tiny, left)
            y = torch.addcmul(y.to(dtype), apart, (rest / left).unsqueeze(-1)).to(q.dtype)
            log_sum, given = torch.nan_to_num(log_sum, neginf=0.0), (grad * left.unsqueeze(-1)).to(q.dtype)
        grad_value = (grad * share.unsqueeze(-1)).to(value.dtype)
        by_tokens = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(call.rows.of(given), q, k, v, call.rows.of(y), call.rows.of(log_sum), 0.0, call.causal),
            attn_mask=added,
            scale=call.scale,
        )
        return *by_tokens, grad_score.to(score.dtype), grad_value, grad_weight, None, None
