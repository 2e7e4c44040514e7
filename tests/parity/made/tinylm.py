"""The tiny decoder of the wrapper fixtures around streams, fractions, gates and deltas along depth.

Letters: B batch, T position, D width, H heads, F hidden width, n streams, m fractions.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...conformance.values.depth_routes import by_head, softmax_mixture
from ...conformance.values.depth_streams import doubly_stochastic
from ...conformance.values.sequence import attended, silu
from ...conformance.values.setting import layer, rms, weighted
from .draft import Draft

V, B, T, D, H, F, BLOCKS, EPS = 13, 3, 4, 12, 2, 10, 2, 1e-6

Streams = list[Tensor]
Branch = Callable[[Tensor], Tensor]
Write = Callable[[str, Streams, Branch], Streams]
"""The streams after a sublayer, given the name of its module and its branch, which begins with a norm."""


class Body:
    """The branches of the decoder, its embedding and its head."""

    def __init__(self, draft: Draft) -> None:
        self.draft, self.ids = draft, draft.tokens("input_ids", V, B, T)
        self.embed, self.head = draft.param("body.embed", V, D, grad=True), draft.param("body.head", V, D)
        self.weights = {}
        for block in range(BLOCKS):
            sizes = {f"attn{block}.w{name}": (D, D) for name in "qkvo"} | {f"ffn{block}.w1": (F, D), f"ffn{block}.w2": (D, F)}
            self.weights |= {name: draft.matrix(f"body.{name}", *size) for name, size in sizes.items()}

    def branch(self, index: int) -> Branch:
        return functools.partial(self.feed_forward if index % 2 else self.attention, index // 2)

    def attention(self, block: int, x: Tensor) -> Tensor:
        q, k, v = (by_head(rms(x, EPS) @ self.weights[f"attn{block}.w{name}"].T, H) for name in "qkv")
        return attended(q, k, v, None) @ self.weights[f"attn{block}.wo"].T

    def feed_forward(self, block: int, x: Tensor) -> Tensor:
        z = rms(x, EPS) @ self.weights[f"ffn{block}.w1"].T
        return (z * (1 + torch.erf(z / 2**0.5)) / 2) @ self.weights[f"ffn{block}.w2"].T


def decoder(d: Draft, n: int, write: Write, leave: Callable[[Streams], Tensor]) -> Draft:
    """Runs it with copies of the embedding as streams; `write` is asked once for each sublayer, in order."""
    body = Body(d)
    x = d.watch("input_embeddings", body.embed[body.ids])
    streams = [x] * n
    d.output("streams_init", torch.stack(streams, dim=-2))
    for index in range(2 * BLOCKS):
        streams = write(f"hc.{index}", streams, body.branch(index))
        d.output(f"streams_{index}", torch.stack(streams, dim=-2))
    left = d.output("collapsed", leave(streams))
    return d.backward(d.output("logits", rms(left, EPS) @ body.head.T))


def sizes(n: int, **more: Any) -> dict[str, Any]:
    return {"vocab": V, "d": D, "blocks": BLOCKS, "heads": H, "ffn": F, "B": B, "T": T, "n": n, **more}


def total(streams: Streams) -> Tensor:
    return torch.stack(streams).sum(0)


def numbers(x: Tensor) -> list[Tensor]:
    """The numbers of the last axis, each beside an axis of one."""
    return list(x.unsqueeze(-2).unbind(-1))


def hyper(name: str, n: int, norm: str | None) -> Draft:
    d = Draft(name, sizes(n))

    def write(hc: str, S: Streams, f: Branch) -> Streams:
        alpha, beta = d.param(f"{hc}.static_alpha", n, n + 1, grad=True), d.param(f"{hc}.static_beta", n, grad=True)
        rows: list[list[Any]] = [[*a, b] for a, b in zip(alpha, beta, strict=True)]
        if norm is not None:
            scale = (1,) if norm == "layer" else ()
            maps, map_b = (
                d.matrix(f"{hc}.dynamic_alpha_fn", D, n + 1, grad=True),
                d.param(f"{hc}.dynamic_beta_fn", D, grad=True),
            )
            s_a, s_b = (d.param(f"{hc}.dynamic_{x}_scale", *scale, grad=True) for x in ("alpha", "beta"))
            gain = 1 + d.param(f"{hc}.norm.gamma", D, grad=True) if norm == "rms" else None
            for j, x in enumerate(S):
                unit = layer(x, 1e-5) if gain is None else rms(x, 0.0) * gain
                scores = torch.cat((s_a * torch.tanh(unit @ maps), s_b * torch.tanh(unit @ map_b).unsqueeze(-1)), -1)
                rows[j] = [old + new for old, new in zip(rows[j], numbers(scores), strict=True)]
        y = f(weighted([row[0] for row in rows], S))
        return [rows[i][-1] * y + weighted([row[1 + i] for row in rows], S) for i in range(n)]

    return decoder(d, n, write, total)


def fractions(name: str, n: int, m: int) -> Draft:
    """The package's layout: rows of alpha are (fraction, stream), its columns (fraction, [read, streams])."""
    d, E = Draft(name, sizes(n, fracs=m)), D // m

    def write(hc: str, S: Streams, f: Branch) -> Streams:
        alpha = d.param(f"{hc}.static_alpha", m * n, m * (n + 1), grad=True).view(m, n, m, n + 1)
        beta = d.param(f"{hc}.static_beta", n * m, grad=True).view(n, m)
        maps, map_b = (
            d.matrix(f"{hc}.dynamic_alpha_fn", E, m * (n + 1), grad=True),
            d.matrix(f"{hc}.dynamic_beta_fn", E, m, grad=True),
        )
        s_a, s_b = (d.param(f"{hc}.dynamic_{x}_scale", grad=True) for x in ("alpha", "beta"))
        gain = 1 + d.param(f"{hc}.norm.gamma", E, grad=True)
        X = torch.stack([torch.stack(x.chunk(m, -1)) for x in S], dim=1)
        unit = rms(X, 0.0) * gain
        weights = alpha[:, :, None, None] + s_a * torch.tanh(unit @ maps).unflatten(-1, (m, n + 1))
        mixed = torch.einsum("fsbtgr,fsbte->grbte", weights, X)
        y = torch.stack(f(torch.cat(list(mixed[:, 0]), -1)).chunk(m, -1))
        writes = beta.T[None].transpose(1, 2)[..., None, None, :] + s_b * torch.tanh(unit @ map_b)
        new = mixed[:, 1:] + torch.einsum("fbte,fsbtg->gsbte", y, writes)
        return [torch.cat(list(new[:, s]), -1) for s in range(n)]

    return decoder(d, n, write, total)


def lucidrains(name: str, n: int, rounds: int | None, version: int, log: bool = False) -> Draft:
    reference = f"made from the equations of PyPI hyper-connections 0.4.11, {{'log_domain_sinkhorn': {log}}}"
    d = Draft(name, sizes(n, **({} if rounds is None else {"sinkhorn_iters": rounds})), reference=reference)
    form = {"order": "sources_first", "start": "exp_minus_max", "rounds": rounds or 20, "start_eps": 0.0, "sum_eps": 0.0}

    def write(hc: str, S: Streams, f: Branch) -> Streams:
        maps, gamma = (
            d.param(f"{hc}.dynamic_alpha_fn", 1, D, n + 1, scale=0.3, grad=True),
            d.param(f"{hc}.norm.gamma", D, grad=True),
        )
        map_b = d.param(f"{hc}.dynamic_beta_fn", D, *((1,) if version == 2 else ()), scale=0.3, grad=True)
        static = d.param(f"{hc}.static_alpha", n, n + 1, grad=True)
        beta = d.param(f"{hc}.static_beta", *((n, 1, 1) if version == 2 else (n,)), grad=True)
        pre, residual = (d.param(f"{hc}.{x}_scale", 1, around=1.0, grad=True) for x in ("pre_branch", "residual"))
        post = d.param(f"{hc}.h_post_scale", around=1.0, grad=True)
        units = torch.stack([rms(x, 1e-20) * (1 + gamma) for x in S], dim=-2)
        logits = units @ maps[0] * torch.cat((pre, residual.expand(n))) + static
        matrix = doubly_stochastic(logits[..., 1:], form)
        writes = 2 * torch.sigmoid(post * (units @ map_b.view(-1)) + beta.view(-1))
        y = f(weighted(numbers(torch.sigmoid(logits[..., 0])), S))
        kept = [weighted(numbers(matrix[..., i]), S) for i in range(n)]
        return [w * y + x for w, x in zip(numbers(writes), kept, strict=True)]

    return decoder(d, n, write, total)


def joint(name: str, n: int, rounds: int | None, read_out: str) -> Draft:
    """DeepSeek-V4, with a learned read-out or a mean; without rounds the identity of HY-V4."""
    d = Draft(name, sizes(n, **({} if rounds is None else {"sinkhorn_iters": rounds})))
    form = {"order": "destinations_first", "start": "softmax", "rounds": rounds, "start_eps": 1e-6, "sum_eps": 1e-6}
    parts = [n, n] if rounds is None else [n, n, n * n]

    def scores(owner: str, prefix: str, S: Streams, widths: list[int]) -> tuple[Tensor, ...]:
        fn = d.matrix(f"{owner}.{prefix}fn", sum(widths), n * D, grad=True)
        base, scale = (
            d.param(f"{owner}.{prefix}{x}", size, grad=True) for x, size in (("base", sum(widths)), ("scale", len(widths)))
        )
        each = torch.cat([one.expand(width) for one, width in zip(scale, widths, strict=True)])
        return (each * (rms(torch.cat(S, -1), 1e-6) @ fn.T) + base).split(widths, dim=-1)

    def write(hc: str, S: Streams, f: Branch) -> Streams:
        pre, post, *comb = scores(hc, "", S, parts)
        y, kept = f(weighted(numbers(torch.sigmoid(pre) + 1e-6), S)), S
        if comb:
            matrix = doubly_stochastic(comb[0].unflatten(-1, (n, n)), form)
            kept = [weighted(numbers(matrix[..., i]), S) for i in range(n)]
        writes = 2 * torch.sigmoid(post) + (0.0 if comb else 1e-6)
        return [w * y + x for w, x in zip(numbers(writes), kept, strict=True)]

    def leave(S: Streams) -> Tensor:
        if read_out == "mean":
            return total(S) / n
        return weighted(numbers(torch.sigmoid(scores("head", "hc_", S, [n])[0]) + 1e-6), S)

    return decoder(d, n, write, leave)


def gated(n: int, rank: int) -> Draft:
    d = Draft("gatedres-qwen4exp-f64", sizes(n, lowrank=rank))

    def read(owner: str, S: Streams) -> tuple[Tensor, Tensor]:
        gain = 1 + d.param(f"{owner}.hc_norm.weight", n * D, grad=True)
        down = d.matrix(f"{owner}.input_mix_weight_down.weight", rank, n * D, grad=True)
        up = d.matrix(f"{owner}.input_mix_weight_up.weight", n * D, rank, grad=True)
        y = torch.cat([rms(x, EPS) for x in S], -1) * gain
        gate = torch.sigmoid(silu(y / n @ down.T) @ up.T)
        return torch.stack((gate * y).chunk(n, -1)).mean(0), y

    def write(hc: str, S: Streams, f: Branch) -> Streams:
        u, y = read(hc, S)
        writes = 2 * torch.sigmoid(y @ d.matrix(f"{hc}.block_inject_weight.weight", n, n * D, grad=True).T / n)
        branch = f(u)
        return [x + w * branch for x, w in zip(S, numbers(writes), strict=True)]

    return decoder(d, n, write, lambda S: read("head", S)[0])


def gemma3n(rank: int) -> Draft:
    d = Draft("laurel-lr-gemma3n-f64", sizes(1, rank=rank))

    def normed(name: str, x: Tensor) -> Tensor:
        return rms(x, EPS) * d.param(f"{name}.weight", D, around=1.0, grad=True)

    def write(hc: str, S: Streams, f: Branch) -> Streams:
        (x,), index = S, int(hc.removeprefix("hc."))
        block = f"hc.{index // 2}"
        if index % 2:
            return [x + normed(f"{block}.post_feedforward_layernorm", f(normed(f"{block}.pre_feedforward_layernorm", x)))]
        u = normed(f"{block}.input_layernorm", x)
        left, right = (
            d.matrix(f"{block}.laurel.linear_{side}.weight", *size, grad=True)
            for side, size in (("left", (rank, D)), ("right", (D, rank)))
        )
        laurel = u + normed(f"{block}.laurel.post_laurel_norm", u @ left.T @ right.T)
        return [(x + normed(f"{block}.post_attention_layernorm", f(u)) + laurel) / math.sqrt(2)]

    return decoder(d, 1, write, lambda S: S[0])


def deltas(name: str, gate: str, num_blocks: int) -> Draft:
    """Delta Attention Residuals as released; streams are shown once per layer."""
    blocks = "deltablock" in name
    d, per_block = Draft(name, sizes(1, num_blocks=num_blocks, gate=gate)), math.ceil(BLOCKS / num_blocks)
    body = Body(d)
    p = d.watch("input_embeddings", body.embed[body.ids])
    d.output("streams_init", p.unsqueeze(-2))
    sources: list[Tensor] = []
    for index in range(2 * BLOCKS):
        place = f"hc.{index // 2}.{('attn', 'mlp')[index % 2]}_res"
        query = d.param(f"{place}_proj.weight", 1, D, grad=True) * d.param(f"{place}_norm.weight", D, around=1.0, grad=True)
        alpha = d.param(f"{place}_alpha", grad=True) if gate == "learnable_alpha" else 1.0
        read = p
        if sources:
            scores = [(query * rms(v, EPS)).sum(-1, keepdim=True) for v in sources]
            read = p + alpha * softmax_mixture(scores, [by_head(v, 1) for v in sources])
        y = body.branch(index)(read)
        if not blocks:
            sources += [p, y] if index == 0 else [y]
        elif index % 2 == 0 and index // 2 % per_block == 0:
            sources.append(p - sources[-1] if sources else p)
        before, p = p, p + y
        d.output(f"streams_{index}", (p if index % 2 else before).unsqueeze(-2))
    left = d.output("collapsed", p)
    return d.backward(d.output("logits", rms(left, EPS) @ body.head.T))


MADE = {
    "hc-static-paper-f64": functools.partial(hyper, "hc-static-paper-f64", 3, None),
    "hc-dynamic-paper-f64": functools.partial(hyper, "hc-dynamic-paper-f64", 2, "layer"),
    "hc-dynamic-lucidrains-f64": functools.partial(hyper, "hc-dynamic-lucidrains-f64", 3, "rms"),
    "hc-dynamic-s3f2-lucidrains-f64": functools.partial(fractions, "hc-dynamic-s3f2-lucidrains-f64", 3, 2),
    "frac-dynamic-lucidrains-f64": functools.partial(fractions, "frac-dynamic-lucidrains-f64", 1, 3),
    "mhc-lucidrains-v1-f64": functools.partial(lucidrains, "mhc-lucidrains-v1-f64", 3, None, 1),
    "mhc-lucidrains-v1-logdomain-f64": functools.partial(lucidrains, "mhc-lucidrains-v1-logdomain-f64", 2, None, 1, log=True),
    "mhc-lucidrains-v2-f64": functools.partial(lucidrains, "mhc-lucidrains-v2-f64", 5, None, 2),
    "mhc-lucidrains-v2-iters3-f64": functools.partial(lucidrains, "mhc-lucidrains-v2-iters3-f64", 3, 3, 2),
    "mhc-deepseekv4-iters3-f64": functools.partial(joint, "mhc-deepseekv4-iters3-f64", 3, 3, "learned"),
    "mhc-glm5next-f64": functools.partial(joint, "mhc-glm5next-f64", 2, 4, "mean"),
    "ihc-hyv4-f64": functools.partial(joint, "ihc-hyv4-f64", 3, None, "learned"),
    "gatedres-qwen4exp-f64": functools.partial(gated, 3, 5),
    "laurel-lr-gemma3n-f64": functools.partial(gemma3n, 4),
    "dar-delta-f64": functools.partial(deltas, "dar-delta-f64", "bias", 4),
    "dar-delta-alpha-f64": functools.partial(deltas, "dar-delta-alpha-f64", "learnable_alpha", 4),
    "dar-deltablock-f64": functools.partial(deltas, "dar-deltablock-f64", "bias", 1),
}
