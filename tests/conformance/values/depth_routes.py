"""Mixers along depth whose weights come from the sources: softmax reads, scores, dense connections.

Letters: D width, H heads, R key rank, S sources, W numbers in all heads of a key.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .setting import EPS, Setting, rms, weighted

Weights = dict[str, Tensor]


def openings(size: int | Sequence[int], count: str, lengths: Sequence[int]) -> set[int]:
    """The sublayers that open a source block, blocks being counted in sublayers or in layers."""
    units = lengths if count == "layer" else [1] * sum(lengths)
    begins = [sum(units[:i]) for i in range(len(units))]
    if isinstance(size, int):
        return set(begins[::size])
    return {begins[sum(size[:n])] for n in range(len(size))}


def softmax_mixture(scores: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """Mixes each head [B T H K] of the values by the softmax of its scores [B T H] over the sources."""
    weights = torch.softmax(torch.stack(list(scores)), dim=0)
    return weighted(weights.unsqueeze(-1), values).flatten(2)


def by_head(x: Tensor, n_heads: int) -> Tensor:
    """[B T H K]."""
    return x.unflatten(-1, (n_heads, -1))


def attention_residuals(s: Setting) -> Tensor:
    c, H, whole = s.config, s.config.n_heads, s.config.form == "inkling2"
    starts = openings(c.block_size, c.count, s.stack.block_lengths)
    values, counts = [s.embeddings], [1]
    emitted = [s.embeddings @ s.ends["key_map"].T] if c.key_rank else []

    def read(p: Weights, which: str = "query") -> Tensor:
        keys = [k / n for k, n in zip(emitted, counts, strict=True)] if emitted else values
        units = [rms(k, EPS) for k in keys]
        query = p[f"{which}.pseudo_query"]
        if c.query == "token":
            query = query + units[-1] @ p[f"{which}.query_map"].T
        gain = p.get(f"{which}.key_gain", torch.ones(()))
        scores = [by_head(query * gain * unit, H).sum(-1) for unit in units]
        if whole:
            scores = [score / math.sqrt(s.embeddings.shape[-1]) for score in scores]
        if c.key_scale == "head":
            scores = [score / math.sqrt((c.key_rank or s.embeddings.shape[-1]) / H) for score in scores]
        if c.source_prior == "log_count":
            scores = [score + math.log(n) for score, n in zip(scores, counts, strict=True)]
        mixed = softmax_mixture(scores, [by_head(v, H) for v in (units if whole else values)])
        return mixed * len(values) if c.mixture == "sum" else mixed

    for site in s.stack.sites:
        p, D = s.mixer(site.index), s.embeddings.shape[-1]
        if site.index == 0:
            views = [values[0]]
        else:
            thrice = whole and site.place == 0
            views = [read(p, which) for which in (("query", "key_query", "value_query") if thrice else ("query",))]
        update = s.f(site.index, *views)
        new = [(values, update[..., :D]), (counts, 1), *([(emitted, update[..., D:])] if c.key_rank else [])]
        for held, one in new:
            held.append(one if site.index in starts else held.pop() + one)  # type: ignore[operator, arg-type]
    return read(s.ends)


def delta_attention_residuals(s: Setting) -> Tensor:
    c, starts = s.config, openings(s.config.block_size, s.config.count, s.stack.block_lengths)
    stream, running = s.embeddings, list[Tensor]()
    sources = [s.embeddings] if c.embedding == "first_read" else []

    def read(p: Weights, route: str) -> Tensor:
        values = [*sources, *(running if c.running_source == "included" else [])]
        if c.null_source == "learned":
            values = [p[f"{route}.null"].expand_as(stream), *values]
        if not values:
            return stream
        scores = [torch.zeros(stream.shape[:-1])]
        if len(values) > 1:
            query = p[f"{route}.pseudo_query"] * p[f"{route}.key_gain"]
            scores = [(query * rms(v, EPS)).sum(-1) for v in values]
        mixed = softmax_mixture([score.unsqueeze(-1) for score in scores], [by_head(v, 1) for v in values])
        return stream + (p[f"{route}.alpha"] if c.gate == "alpha" else 1.0) * mixed

    for site in s.stack.sites:
        p, g = s.mixer(site.index), site.index
        views = [read(p, "route")]
        if c.value_routing == "separate" and site.place == 0:
            views = [views[0], views[0], read(p, "value_route")]
        update = s.f(g, *views)
        if c.entries == "as_released":
            if g in starts:
                sources.append(stream - sources[-1] if sources else stream)
        else:
            if g == 0 and c.embedding == "second_read":
                sources.append(s.embeddings)
            running = [update if g in starts else running[0] + update]
            if g + 1 in starts:
                sources.append(running.pop())
        stream = stream + update
    return stream


def depth_attention(s: Setting) -> Tensor:
    c, D = s.config, s.embeddings.shape[-1]
    W = c.n_heads * (c.head_dim or D // c.n_heads)
    keys, values = list[Tensor](), list[Tensor]()

    def read(h: Tensor, p: Weights) -> Tensor:
        state = rms(h, EPS) * p["gain"] if c.states == "normalised" else h
        # Queries above keys above values; without a choice to make there may be values alone.
        *asking, W_V = p["projection"].split(W)
        W_K, W_Q = (*asking[::-1], *(torch.zeros_like(W_V),) * 2)[:2]
        key, query = (by_head(state @ W.T, c.n_heads) for W in (W_K, W_Q))
        if c.qk_norm == "head":
            key = rms(key, EPS) * p["key_gain"] if "key_gain" in p else key
            query = rms(query, EPS) * p["query_gain"] if "query_gain" in p else query
        keys.append(key)
        values.append(by_head(state @ W_V.T, c.n_heads))
        if c.temperature == "learned":
            query = query * p["temperature"].unsqueeze(-1) if "temperature" in p else query
        first = 0 if c.window is None else max(0, len(keys) - c.window)
        scores = [(query * key).sum(-1) / math.sqrt(W // c.n_heads) for key in keys[first:]]
        z = softmax_mixture(scores, values[first:])
        z = z @ p["output"].T if c.output == "matrix" else z
        return h + z if c.mode == "add" else z

    x = s.embeddings
    for site in s.stack.sites:
        if site.place == 0 or c.granularity == "sublayer":
            x = read(x, s.ends if c.projections == "shared" else s.mixer(site.index))
        x = x + s.f(site.index, x)
    return read(x, s.ends) if c.head == "read" else x


ACTIVATIONS = {
    "relu": lambda z: z.clamp(min=0),
    "gelu": lambda z: z * (1 + torch.erf(z / math.sqrt(2))) / 2,
    "silu": lambda z: z / (1 + torch.exp(-z)),
    "identity": lambda z: z,
}


def deep_cross_attention(s: Setting) -> Tensor:
    c, deltas = s.config, [s.embeddings]

    def columns() -> list[Tensor]:
        if c.middle == "drop":
            return deltas if len(deltas) <= 2 * c.k else [*deltas[: c.k], *deltas[-c.k :]]
        if c.k is None or len(deltas) <= c.k + 2:
            return deltas
        return [deltas[0], torch.stack(deltas[1 : -c.k]).sum(0), *deltas[-c.k :]]

    def read(p: Weights) -> list[Tensor]:
        ways = []
        for way, bias in enumerate(p["grn.bias"]):
            weights = list(bias)
            if c.variant in ("v3", "dca"):
                vectors = p["grn.score_weight"][way].expand(len(bias), -1)
                seen = [rms(v, EPS) * p["grn.score_gain"] if c.score_norm == "rms" else v for v in columns()]
                scores = [ACTIVATIONS[c.activation]((v * w).sum(-1, keepdim=True)) for v, w in zip(seen, vectors, strict=True)]
                weights = [b + score for b, score in zip(bias, scores, strict=True)]
            ways.append(weighted(weights, columns()))
        return ways

    g = 0
    for length in s.stack.block_lengths:
        ways, added = read(s.mixer(g)), torch.zeros_like(s.embeddings)
        for place in range(length):
            added = added + (s.f(g, ways[0] + added) if place else s.f(g, *ways))
            g += 1
        deltas.append(added)
    return read(s.ends)[0]


def muddformer(s: Setting) -> Tensor:
    c, L = s.config, s.stack.n_blocks
    outputs, hats = [s.embeddings], list[Tensor]()

    def ways_after(i: int, p: Weights) -> list[Tensor]:
        """What the next block reads after i blocks: the way of the residual is the last one."""
        X = outputs[i]
        hats.append(rms(X, EPS) * p["sum.source_gain"] if "sum.source_gain" in p else X)
        if i == 0 or i % c.period:
            return [X]
        read = [j for j in range(i + 1) if j % c.dilation == i % c.dilation]
        read = [j for j in read if c.window is None or j == 0 or j > i - c.window]
        C = 4 if c.ways == "qkvr" and i < L else 1
        weights: Any = p["sum.static"]
        if c.weights == "dynamic":
            unit = rms(X, EPS if c.weight_eps is None else c.weight_eps) * p.get("sum.input_gain", torch.ones(()))
            width = C * len(read) * (c.expand_last if i == L else 1)
            assert len(p["sum.to_hidden"]) == (width if c.hidden == "paper" else (width // 64 + 1) * 64)
            hidden = F.gelu(unit @ p["sum.to_hidden"].T, approximate="tanh" if c.gelu == "tanh" else "none")
            weights = weights + (hidden @ p["sum.to_weights"].T).unflatten(-1, (C, len(read)))
        ways = [weighted(weights[..., way, :].unsqueeze(-1).unbind(-2), [hats[j] for j in read]) for way in range(C)]
        if c.post_norm != "none":
            gains = list(p["sum.post_gain"])
            plain = C - len(gains)
            assert len(gains) == (C if c.post_norm == "all" else 1)
            ways = [*ways[:plain], *(rms(way, EPS) * gain for way, gain in zip(ways[plain:], gains, strict=True))]
            ways = [X + way for way in ways]
        return ways

    g = 0
    for i, length in enumerate(s.stack.block_lengths):
        *views, base = ways_after(i, s.mixer(g))
        added = torch.zeros_like(base)
        for place in range(length):
            later = base + added if c.residual == "sequential" else base
            added = added + s.f(g, *([later] if place else views or [base]))
            g += 1
        outputs.append(base + added)
    return ways_after(L, s.ends)[-1]
