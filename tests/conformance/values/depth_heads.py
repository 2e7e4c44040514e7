"""Mixers along depth inside attention: values and keys of earlier layers."""

import torch
from torch import Tensor

from twoaxis.core.position import SublayerPosition

from .setting import EPS, B, Setting, T, context, rms, seen, unrotated_of, weighted

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


def depth_value_mixing(s: Setting) -> Tensor:
    c, x, keys, values = s.config, s.embeddings, list[Tensor](), list[Tensor]()
    for site in s.stack.sites:

        def mix(q: Tensor, k: Tensor, v: Tensor, index: int = site.index) -> Three:
            n = len(keys)
            read = [i for i in range(n) if i % c.stride == 0 or n - i <= c.recent_window]
            mixed = v
            if read and c.weights != "off":
                query, sources = q.unflatten(2, (k.shape[2], -1)).mean(3), [*(values[i] for i in read), v]
                scores = torch.stack([(query * key).sum(-1) for key in (*(keys[i] for i in read), k)]) / k.shape[-1] ** 0.5
                weights = scores.softmax(0) if c.weights == "attention" else torch.full_like(scores, 1 / len(sources))
                mixed = weighted(weights.unsqueeze(-1), sources)
                if c.blend == "annealed":
                    mixed = v + s.mixer(index)["blend"] * (mixed - v)
            keys.append(k)
            values.append(mixed)
            return q, k, mixed

        off = not site.slot.heads or c.weights == "off"
        x = x + (s.f(site.index, x) if off else s.f_of_heads(site.index, x, mix))
    return x


def mixture_of_depths_attention(s: Setting) -> Tensor:
    c, slots = s.config, list[tuple[Tensor, Tensor]]()
    x: Tensor = s.embeddings
    attends = [site.slot.heads is not None for site in s.stack.sites]
    gain = torch.empty(0)
    for site in s.stack.sites:

        def added(x: Tensor, update: Tensor, index: int = site.index) -> Tensor:
            assert s.norm(index) == (1.0 if c.norm == "pre" else None)
            return x + update if c.norm == "pre" else rms(x + update, EPS) * s.mixer(index)["gain"]

        if c.weights == "off":
            x = added(x, s.f(site.index, x))
            continue

        def further(q: Tensor, k: Tensor, v: Tensor, site: SublayerPosition = site, x: Tensor = x) -> tuple[Tensor, ...]:
            known = list(slots)
            slots.append((unrotated_of(site, x)[0], v))
            if not known:
                return q, k, v
            groups = q.shape[2] // k.shape[2]
            scores = [(q * key.repeat_interleave(groups, 2)).sum(-1) / k.shape[-1] ** 0.5 for key, _ in known]
            logits = torch.stack(scores) * (c.weights == "attention")
            value = weighted(logits.softmax(0).unsqueeze(-1), [u.repeat_interleave(groups, 2) for _, u in known])
            blend = (s.mixer(site.index)["blend"].expand(B, T, 1),) if c.blend == "annealed" else ()
            return q, k, v, logits.logsumexp(0), value, *blend

        if attends[site.index]:
            gain = unrotated_of(site, x)[1]
            x = added(x, s.f_of_heads(site.index, x, further))
            continue
        if c.slots == "attention_and_feed_forward" and any(attends[site.index :]):
            parts = (seen(site, x) @ s.mixer(site.index)["slot.weight"].T).unflatten(-1, (-1, *slots[0][0].shape[2:]))
            value = parts[:, :, -1]
            slots.append((rms(parts[:, :, 0], site.norm_eps) * gain.unsqueeze(2), value))
        x = added(x, s.f(site.index, x))
    return x
