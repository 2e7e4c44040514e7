"""Mixers along depth whose weights are parameters: scalars, free sums, convex sums, low-rank maps.

Letters: D width, S sources.
"""

import math
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from .setting import EPS, Setting, context, layer, rms, weighted


def residual(s: Setting) -> Tensor:
    x = s.embeddings
    for g in range(s.stack.n_sublayers):
        x = x + s.f(g, x)
    return x


def residual_scalars(s: Setting) -> Tensor:
    kind = s.config.embedding
    x_0 = s.embeddings if kind == "raw" else rms(s.embeddings, torch.finfo(torch.float64).eps)
    x = x_0 if kind == "normalised_start" else s.embeddings
    middle = s.stack.n_blocks // 2 if s.config.backout_layer == "middle" else s.config.backout_layer
    kept = torch.zeros_like(x)
    for g, site in enumerate(s.stack.sites):
        if s.config.granularity == "sublayer" or site.place == 0:
            x = s.mixer(g)["stream_weight"] * x + s.mixer(g)["embedding_weight"] * x_0
        x = x + s.f(g, x)
        kept = x if site.block == middle else kept
    return x if middle is None else x - s.ends["backout_weight"] * kept


def norm_placement(s: Setting) -> Tensor:
    c, x, N = s.config, s.embeddings, s.stack.n_sublayers
    post_blocks = c.post_blocks if isinstance(c.post_blocks, int) else max(1, int(c.post_blocks * s.stack.n_blocks))
    for site in s.stack.sites:
        g, p = site.index, s.mixer(site.index)
        placement = {True: "post", False: "pre"}[site.block < post_blocks] if c.placement == "mix" else c.placement
        scale = (1 + site.block) ** -0.5 if placement == "layer_scaling" else 1.0
        unnormed = placement in ("post", "deepnorm", "reordered")
        assert s.norm(g) == (None if unnormed else pytest.approx(scale, rel=1e-15))
        view = (1 - p["blend"]) * rms(x, EPS) * p["input_gain"] + p["blend"] * x if "input_gain" in p else x
        y = s.f(g, view)
        alpha = {"deepnorm": N**0.25, "keel": N if g > 1 else 1}.get(placement, 1)
        if placement in ("pre", "layer_scaling") or (placement == "keel" and g == 0):
            x, plain = x + y, x + y
        elif placement in ("sandwich", "reordered"):
            x, plain = x + rms(y, EPS) * p["gain"], x + y
        elif placement == "deepnorm":
            x, plain = layer(alpha * x + y, c.layer_eps) * p["gain"] + p["bias"], x + y
        else:
            x, plain = rms(alpha * x + y, EPS) * p["gain"], x + y
        x = plain + p["blend"] * (x - plain) if "blend" in p else x
    return x


def residual_dual(s: Setting) -> Tensor:
    x, r, ends = s.embeddings, s.embeddings, s.ends
    for g in range(s.stack.n_sublayers):
        p = s.mixer(g)
        assert s.norm(g) is None
        blend = p.get("blend", torch.ones((), dtype=x.dtype))
        y = s.f(g, (1 - blend) * rms(x, EPS) * p["input_gain"] + blend * x if "blend" in p else x)
        r = r + y
        x = (1 - blend) * (x + y) + blend * (layer(x + y, s.config.layer_eps) * p["norm.gain"] + p["norm.bias"])
    blend = ends.get("blend", torch.ones((), dtype=x.dtype))
    return x + blend * (layer(r, s.config.layer_eps) * ends["norm.gain"] + ends["norm.bias"])


def siamese_norm(s: Setting) -> Tensor:
    x, y = s.embeddings, s.embeddings
    for site in s.stack.sites:
        p = s.mixer(site.index)
        of_heads = s.config.form == "hybrid_pre" and site.place == 0
        assert s.norm(site.index) == (None if of_heads else 1)
        x = x if of_heads else rms(x, EPS) * p["x_gain"]
        u = (p["x_gain"] * x if of_heads else x) + rms(y, EPS) * p["input_gain" if of_heads else "y_gain"]
        z = s.f(site.index, u)
        x, y = x + z / math.sqrt(2 * (site.block + 1)), y + z
    return rms(x, EPS) * s.ends["x_gain"] + rms(y, EPS) * s.ends["y_gain"]


def unit_ends(s: Setting) -> dict[int, int]:
    """The last sublayer of each unit, a block or a sublayer, and the number of the unit, from 1."""
    if s.config.granularity == "sublayer":
        return {g: g + 1 for g in range(s.stack.n_sublayers)}
    return {end - 1: i for i, end in enumerate(accumulate(s.stack.block_lengths), start=1)}


def denseformer(s: Setting) -> Tensor:
    c, ends = s.config, unit_ends(s)
    stream, outputs = s.embeddings, [s.embeddings]
    for g in range(s.stack.n_sublayers):
        update = s.f(g, stream)
        stream = (s.mixer(g)["gain"] if c.variant == "skip_gains" else 1.0) * stream + update
        if g in ends:
            outputs.append(stream)
            row = _row(c, ends[g], len(ends))
            if row:
                stream = weighted(s.mixer(g)["weights"], [outputs[j] for j in row])
    return stream


def _row(c: Any, i: int, n_units: int) -> list[int]:
    """The outputs that are summed after unit i."""
    if c.variant != "dwa":
        return list(range(i + 1)) if c.variant == "connect_to_last" and i == n_units else []
    if i % c.period:
        return []
    if c.stored == "every":
        row = [j for j in range(i + 1) if j % c.dilation == i % c.dilation]
    else:
        row = [c.period * r for r in range(i // c.period + 1) if r % c.dilation == i // c.period % c.dilation]
    return row if c.last is None else sorted({0, *row[-c.last :]})


def elc_bert(s: Setting) -> Tensor:
    c = s.config
    norms = {"layer": True, "none": False, None: c.variant == "normalized"}[c.embedding_norm]
    outputs = [layer(s.embeddings, c.source_eps) if norms else s.embeddings]

    def combined(p: dict[str, Tensor]) -> Tensor:
        if "combination.logits" not in p:
            return outputs[-1]
        a = p["combination.logits"].softmax(0)
        return weighted(1 + p["combination.blend"] * (a - 1) if c.blend == "annealed" else a, outputs)

    g = 0
    for length in s.stack.block_lengths:
        U, A = combined(s.mixer(g)), torch.zeros_like(s.embeddings)
        for place in range(length):
            A = A + s.f(g, A if place and c.variant == "base" else U + A)
            g += 1
        outputs.append(layer(A, c.source_eps) if c.variant == "normalized" else A)
    return combined(s.ends)


def vertical_attention(s: Setting) -> Tensor:
    c, ends = s.config, unit_ends(s)
    sources = [s.embeddings] if c.embedding == "source" else []
    stream = last = s.embeddings

    def normalised(h: Tensor) -> Tensor:
        if c.norm_kind == "layer":
            return layer(h, EPS)
        return rms(h, EPS) / (h.shape[-1] ** 0.5 if c.norm_kind == "l2" else 1)

    def read(p: dict[str, Tensor]) -> Tensor:
        if not sources:
            return stream
        a = list(p["mixture.logits"].softmax(0)) if "mixture.logits" in p else [torch.ones(())]
        if c.norm == "weights":
            each = [w / (h.square().mean(-1, keepdim=True) + EPS).sqrt() for w, h in zip(a, sources, strict=True)]
            a = [w / torch.stack(each).sum(0) for w in each]
        mixed = weighted(a, [normalised(h) for h in sources] if c.norm == "sources" else sources)
        mixed = normalised(mixed) if c.norm == "sum" else mixed
        return mixed if c.skip == "none" else stream + (p["mixture.gate"] if c.skip == "gated" else 1) * mixed

    opens = True
    U = added = torch.zeros_like(s.embeddings)
    for g in range(s.stack.n_sublayers):
        if opens:
            U, added = read(s.mixer(g)), torch.zeros_like(s.embeddings)
        added = added + s.f(g, U + added)
        opens = g in ends
        if opens:
            stream = U + added
            last = added if c.source == "delta" else stream
            sources.append(last)
    return read(s.ends) if c.head == "mixture" else last if c.skip == "none" else stream


def laurel(s: Setting) -> Tensor:
    c, ends, opens = s.config, unit_ends(s), True
    inputs, added = [s.embeddings], torch.zeros_like(s.embeddings)
    for g in range(s.stack.n_sublayers):
        added = torch.zeros_like(s.embeddings) if opens else added
        added = added + s.f(g, inputs[-1] + added)
        opens = g in ends
        if opens:
            a, b = _bounded(c, s.mixer(g))
            inputs.append(a * added + b * _residual_way(c, s.mixer(g), inputs))
    return inputs[-1]


def _bounded(c: Any, p: dict[str, Tensor]) -> tuple[Any, Any]:
    if "rw" not in c.variant:
        return 1.0, 1.0
    a, b = 2 * (p["logits"].softmax(0) if c.bound == "softmax" else p["logits"].sigmoid())
    return a, b


def _residual_way(c: Any, p: dict[str, Tensor], inputs: list[Tensor]) -> Tensor:
    x = inputs[-1]
    if c.variant == "rw":
        return x
    seen = inputs[-c.n_previous :] if "pa" in c.variant else [x]
    g = p["input_weights"] if "pa" in c.variant else torch.ones(1, dtype=x.dtype)
    which = c.previous_map or ("separate" if c.variant == "rw_lr_pa" else "shared")
    if which == "identity":
        return x + weighted(g, seen)
    r = c.rank
    maps = [slice(n * r, n * r + r) if which == "separate" else slice(r) for n in range(len(seen))]
    return x + weighted(g, [h @ p["down"][m].T @ p["up"][:, m].T for h, m in zip(seen, maps, strict=True)])


def laurel_gemma3n(s: Setting) -> Tensor:
    x = s.embeddings
    for site in s.stack.sites:
        p, c = s.mixer(site.index), context(x)
        joined = x + rms(s.f(site.index, x), EPS) * p["update_gain"]
        if site.place == 0:
            joined = (joined + c + rms(c @ p["down"].T @ p["up"].T, EPS) * p["gain"]) / math.sqrt(2)
        x = joined
    return x
