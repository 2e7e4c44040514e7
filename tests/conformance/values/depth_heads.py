"""Mixers along depth inside attention: values and keys of earlier layers."""

import torch
from torch import Tensor

from .setting import Setting, context, weighted

Three = tuple[Tensor, Tensor, Tensor]


def lime(s: Setting) -> Tensor:
    x, known = s.embeddings, list[Tensor]()
    for site in s.stack.sites:

        def mix(q: Tensor, k: Tensor, v: Tensor, index: int = site.index) -> Three:
            pairs = torch.cat((k, v), dim=-1)
            known.extend(pairs.unbind(2))
            if len(known) == k.shape[2]:
                return q, k, v
            router = torch.cat((s.mixer(index)["earlier"], s.mixer(index)["own"]), dim=1)
            routed = torch.stack([weighted(row, known) for row in router], dim=2)
            return q, *routed.split(k.shape[-1], dim=-1)  # type: ignore[return-value]

        x = x + (s.f_of_heads(site.index, x, mix) if site.slot.heads else s.f(site.index, x))
    return x


def value_residual(s: Setting) -> Tensor:
    x, values = s.embeddings, list[Tensor]()
    mixing = [n for n in range(1, s.stack.n_blocks) if s.config.layers is None or n in s.config.layers]

    def update(index: int, x: Tensor) -> Tensor:
        def mix(q: Tensor, k: Tensor, v: Tensor) -> Three:
            n = len(values)
            values.append(v)
            return q, k, _mixed(s, s.mixer(index), values, context(x), mixing.index(n)) if n in mixing else v

        return s.f_of_heads(index, x, mix) if s.stack.sites[index].slot.heads else s.f(index, x)

    for g in range(s.stack.n_sublayers):
        x = x + update(g, x)
    return x


def _mixed(s: Setting, p: dict[str, Tensor], values: list[Tensor], seen: Tensor, rank: int) -> Tensor:
    """The values of the layer whose own ones are the last of these; `rank` counts the layers that mix."""
    c, (first, *_, own) = s.config, values
    if c.variant == "svformer":
        return first
    if c.variant == "constant":
        return c.first * first + c.own * own
    if c.variant == "gated":
        gate = torch.sigmoid(seen @ p["gate_weight"].T + p["gate_bias"]).unsqueeze(-1)
        return first + gate * (own - first)
    if c.variant == "plus":
        shared = s.mixer(0)
        return shared["scale"] * shared["logits"].softmax(0)[rank] * first + p["own"] * own
    return weighted(p["weights"][0], values if c.variant == "dense" else (first, own))
