"""N-gram tables, token by token and number by number, for the ids of the setting.

Letters: B batch, T position, D width.
"""

import math
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .setting import IDS, VOCAB, rms

BLOCK = 2
"""Of the mixer, in a stack without other tables."""

NEXT = 2**64


def splitmix64(state: int) -> int:
    z = (state + 0x9E3779B97F4A7C15) % NEXT
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % NEXT
    z = (z ^ z >> 27) * 0x94D049BB133111EB % NEXT
    return z ^ z >> 31


def multipliers(c: Any, vocabulary: int) -> list[int]:
    half = (2**63 - 1) // vocabulary // 2
    if c.hash == "pcg64":
        drawn = np.random.default_rng(c.seed + 10007 * BLOCK).integers(0, half, size=c.order).tolist()
    else:
        drawn = [splitmix64((c.seed + 0x9E3779B97F4A7C15 * k) % NEXT) % half for k in range(1, c.order + 1)]
    return [2 * r + 1 for r in drawn]


def sizes(c: Any) -> list[list[int]]:
    """The rows of each table, by length."""
    smallest = list(c.rows) * (1 if len(c.rows) > 1 else c.order - 1)
    if c.hash == "int32":
        return [smallest]
    if c.hash == "polynomial":
        return [[r + 2 * (n * c.heads + j) + 1 for j in range(c.heads)] for n, r in enumerate(smallest)]
    used: set[int] = set()
    found: list[list[int]] = []
    for r in smallest:
        own: list[int] = []
        for p in count(r):
            if len(own) == c.heads:
                break
            if p > 1 and p not in used and all(p % d for d in range(2, p)):
                own.append(p)
                used.add(p)
        found.append(own)
    return found


def window(c: Any, row: list[int], t: int) -> list[int]:
    """The id of token t and those before it, as they are hashed."""
    new = c.compression or range(VOCAB)
    fill, found, open_ = new[c.fill_id], [], row[t] not in c.blank_ids
    for back in range(c.order):
        if back and open_:
            open_ = t >= back and row[t - back] not in (*c.end_ids, *c.blank_ids)
        found.append(new[row[t - back]] if open_ else fill)
    return found


def row_of(c: Any, ids: list[int], n: int, p: int) -> int:
    """The row of an n-gram in a table of p rows."""
    vocabulary = c.hash_vocab or (max(c.compression) + 1 if c.compression else VOCAB)
    if c.hash == "polynomial":
        return sum(x * vocabulary**k for k, x in enumerate(ids[:n])) % p
    mixed = 0
    for x, m in zip(ids[:n], multipliers(c, vocabulary), strict=False):
        mixed ^= x * m
    return mixed % p


def signs(row: int, width: int) -> list[int]:
    return [1 - 2 * (splitmix64(row * -(-width // 64) + i // 64) >> i % 64 & 1) for i in range(width)]


def looked_up(c: Any, table: Tensor, row: list[int], t: int) -> Tensor:
    """What the tables say of a token, side by side."""
    if c.hash == "int32":
        p, x, before = sizes(c)[0][0], row[t], row[t - 1] if t else None
        found = p - 1 if before is None else (36313 * x ^ 27191 * before) % (p - 1)
        sign = signs(0 if before is None else (before ^ x) % c.sign_rows, table.shape[1]) if c.sign_rows else 1
        return table[found] * torch.tensor(sign)
    parts, first, ids = [], 0, window(c, row, t)
    for n, own in enumerate(sizes(c), 2):
        for p in own:
            found = row_of(c, ids, n, p)
            nothing = row[t] in c.blank_ids or (c.hash == "polynomial" and found == 0)
            parts.append(table[first + found] * (0 if nothing else 1))
            first += p
    assert table.shape[0] == -(-first // c.row_multiple) * c.row_multiple
    return torch.cat(parts)


def ngram_embedding(c: Any, p: dict[str, Tensor], x: Tensor, eps: float) -> Tensor:
    B, T, D = x.shape
    rows = [torch.stack([looked_up(c, p["table.weight"], IDS[b].tolist(), t) for t in range(T)]) for b in range(B)]
    found = torch.stack(rows)
    if c.maps == "none":
        return found
    mapped = found @ p["maps.weight"].T + (p["bias"] if c.maps == "biased" else 0.0)
    if c.gate == "none":
        return mapped
    key, value = mapped[..., :D], mapped[..., D:]
    score = (x * rms(key, c.key_eps or eps) * p["key_gain"]).sum(-1, keepdim=True) / math.sqrt(D)
    value = value / (1 + torch.exp(-score.sign() * score.abs().clamp(min=1e-6).sqrt()))
    if c.conv == "none":
        return value
    normal, y = rms(value, c.conv_eps or eps) * p["conv_gain"], torch.zeros_like(value)
    for t in range(T):
        for s in range(min(c.kernel, t // c.order + 1)):
            y[:, t] += p["taps"][:, c.kernel - 1 - s] * normal[:, t - s * c.order]
    return value + y * torch.sigmoid(y)
