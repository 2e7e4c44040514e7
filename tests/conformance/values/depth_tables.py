"""Mixers along depth with tables of tokens, around a mixer that has the stream."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import depth_routes, depth_sums
from .setting import IDS, D, G, K, Setting, context, part_of, rms

Three = tuple[Tensor, Tensor, Tensor]


@dataclass
class Inner(Setting):
    """What the equation of the stream is computed from; its sublayers are run by the mixer around it."""

    update: Callable[..., Tensor] = torch.zeros

    def f(self, index: int, *views: Tensor) -> Tensor:
        return self.update(index, *views)


def left_by(inner: Inner) -> Tensor:
    """What the mixer of the stream leaves."""
    found = [getattr(module, inner.config.kind, None) for module in (depth_sums, depth_routes)]
    equation: Any = next(one for one in found if one is not None)
    return equation(inner)


def value_embedding(s: Setting) -> Tensor:
    c, L = s.config, s.stack.n_blocks
    blocks = [i for i in range(L) if i % 2 == (L - 1) % 2] if c.layers == "alternate" else c.layers

    def mix(q: Tensor, k: Tensor, v: Tensor, p: dict[str, Tensor], view: Tensor) -> Three:
        row, seen = p["table"][IDS], context(view)
        if c.gate == "nanochat":
            gate = 3 * torch.sigmoid(seen[..., : min(12, D)] @ p["gate_weight"].T)
        elif c.gate == "modded":
            pair = torch.cat((seen[..., :6], row.reshape(*row.shape[:2], G * K)[..., :6]), -1)
            gate = 2 * torch.sigmoid(pair @ p["gate_weight"].T)
        else:
            gate = torch.ones(*v.shape[:3], dtype=v.dtype)
        return q, k, v + gate.unsqueeze(-1) * row

    def update(index: int, *views: Tensor) -> Tensor:
        site = s.stack.sites[index]
        if site.slot.heads is None or site.block not in blocks:
            return s.f(index, *views)
        (view,) = views
        return s.f_of_heads(index, view, partial(mix, p=s.mixer(index), view=view))

    weights = {re.sub(r"^(mixers\.\d+)\.stream\.", r"\1.", name): value for name, value in s.weights.items()}
    return left_by(Inner(c.stream, s.stack, weights, s.embeddings, update=update))


def per_layer_embedding(s: Setting) -> Tensor:
    c, x, start = s.config, s.embeddings, 0
    width = c.d_embedding
    for length in s.stack.block_lengths:
        stack = replace(s.stack, block_lengths=(length,), slots=s.stack.slots[start : start + length])
        parts = [part_of(s.mixer(start + place), "stream.") for place in range(length)]
        weights = {f"mixers.{place}.{name}": value for place, part in enumerate(parts) for name, value in part.items()}
        # The mixer of the stream never looks further back than its block.
        x = left_by(Inner(c.stream, stack, weights, x, update=lambda index, *views, at=start: s.f(at + index, *views)))
        start += length
        p = s.mixer(start - 1)
        known = rms(s.embeddings @ p["context_map"].T / math.sqrt(D), s.stack.norm_eps) * s.ends["context_gain"]
        vector = (known + p["table"][IDS] * math.sqrt(width)) / math.sqrt(2)
        gated = F.gelu(x @ p["gate"].T, approximate="tanh") * vector
        x = x + rms(gated @ p["output"].T, s.stack.norm_eps) * p["gain"]
        x = x * p["scale"] if c.preset == "gemma4" else x
    return x
