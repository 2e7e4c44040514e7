"""Exact windowed attention in other ways that torch alone offers: what ours is measured against.

Letters: B batch, H heads, T tokens, K key width, c tokens in a chunk, n chunks, w window. Every way takes q, k, v [B H T K]
with as many key heads as query heads, and a T that is a multiple of c.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
LARGEST_DENSE_TOKENS = 2048
"""Beyond this a T x T mask only costs time: chunks are faster by an order of magnitude."""


def formulations(tokens: int, window: int) -> dict[str, Attention]:
    """Every way that makes sense at this size, by name; all of them give the same numbers."""
    found: dict[str, Attention] = {}
    if tokens <= LARGEST_DENSE_TOKENS:
        found["dense mask"] = dense(tokens, window)
    for chunk in sorted({max(32, window), max(64, window), max(128, window)}):
        if chunk <= tokens:
            found[f"chunks of {chunk} as heads, joined"] = as_heads(chunk, window)
            found[f"chunks of {chunk} as batch, joined"] = as_batch(chunk, window)
            found[f"chunks of {chunk} as heads, unfolded"] = unfolded(chunk, window)
    found["products and softmax in chunks"] = plain_products(min(max(64, window), tokens), window)
    return found


def dense(tokens: int, window: int) -> Attention:
    """One call with a T x T mask."""
    age = torch.arange(tokens)[:, None] - torch.arange(tokens)
    mask = (age >= 0) & (age < window)
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def as_heads(chunk: int, window: int) -> Attention:
    """[B*H, n, c, K]: a chunk beside the end of the one before it, in the place of a head."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        B, H, T, K = q.shape
        mask = _mask(T // chunk, chunk, window)
        q, k, v = (x.reshape(B * H, T // chunk, chunk, K) for x in (q, k, v))
        y = F.scaled_dot_product_attention(q, _joined(k, window), _joined(v, window), attn_mask=mask)
        return y.reshape(B, H, T, K)

    return attend


def as_batch(chunk: int, window: int) -> Attention:
    """[B*n, H, c, K]: a chunk in the place of a row of the batch."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        B, H, T, K = q.shape
        n = T // chunk
        mask = _mask(n, chunk, window).repeat(B, 1, 1).unsqueeze(1)
        parts = [x.reshape(B * H, n, chunk, K) for x in (q, k, v)]
        parts = [parts[0], _joined(parts[1], window), _joined(parts[2], window)]
        q, k, v = (x.reshape(B, H, n, -1, K).transpose(1, 2).flatten(0, 1) for x in parts)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return y.reshape(B, n, H, chunk, K).transpose(1, 2).reshape(B, H, T, K)

    return attend


def unfolded(chunk: int, window: int) -> Attention:
    """As `as_heads`, with overlapping views of padded keys instead of joined ones."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        B, H, T, K = q.shape
        mask = _mask(T // chunk, chunk, window)
        keys, values = (
            F.pad(x.reshape(B * H, T, K), (0, 0, window - 1, 0)).unfold(1, chunk + window - 1, chunk).transpose(-1, -2)
            for x in (k, v)
        )
        y = F.scaled_dot_product_attention(q.reshape(B * H, T // chunk, chunk, K), keys, values, attn_mask=mask)
        return y.reshape(B, H, T, K)

    return attend


def plain_products(chunk: int, window: int) -> Attention:
    """As `as_heads`, with two products and a softmax."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        B, H, T, K = q.shape
        mask = _mask(T // chunk, chunk, window)
        q, k, v = (x.reshape(B * H, T // chunk, chunk, K) for x in (q, k, v))
        scores = (q @ _joined(k, window).transpose(-1, -2)) / math.sqrt(K)
        return (torch.softmax(scores.masked_fill(~mask, -torch.inf), dim=-1) @ _joined(v, window)).reshape(B, H, T, K)

    return attend


def _joined(x: Tensor, window: int) -> Tensor:
    """[rows, n, c, K] to [rows, n, c + window - 1, K]; a window is at most one chunk."""
    before = F.pad(x, (0, 0, 0, 0, 1, 0))[:, :-1, x.shape[2] - (window - 1) :]
    return torch.cat((before, x), dim=2)


def _mask(n: int, chunk: int, window: int) -> Tensor:
    row, column = torch.arange(chunk)[:, None], torch.arange(chunk + window - 1)
    band = (column >= row) & (column - row < window)
    exists = (torch.arange(n)[:, None, None] > 0) | (column >= window - 1)
    return band & exists
