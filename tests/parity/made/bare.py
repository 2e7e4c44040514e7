"""The decoder whose branches hold no norm, around streams of every matrix, delayed reads, and two lanes.

Letters: B batch, T position, D width, H heads, F hidden width, n streams.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...conformance.values.depth_routes import by_head
from ...conformance.values.depth_streams import PRESETS, stream_matrix
from ...conformance.values.sequence import attended
from ...conformance.values.setting import rms, weighted
from .draft import Draft
from .tinylm import numbers

V, B, T, D, H, F, BLOCKS = 11, 3, 4, 12, 2, 10, 2

Streams = list[Tensor]
Branch = Callable[[Tensor], Tensor]


def sizes(**more: Any) -> dict[str, Any]:
    return {"V": V, "d": D, "blocks": BLOCKS, "H": H, "f": F, "B": B, "T": T, **more}


class Body:
    """The branches, the norms before them, the embedding and the head; `gain` is how the gains of norms are named, if any."""

    def __init__(self, draft: Draft, blocks: int, eps: float, gain: str | None) -> None:
        self.draft, self.eps = draft, eps
        self.ids = draft.tokens("input_ids", V, B, T)
        self.embed, self.head = draft.param("body.embed", V, D, grad=True), draft.param("body.head", V, D)
        self.weights = {}
        for block in range(blocks):
            shapes = {f"attn{block}.w{name}": (D, D) for name in "qkvo"} | {f"ffn{block}.w1": (F, D), f"ffn{block}.w2": (D, F)}
            self.weights |= {name: draft.matrix(f"body.{name}", *shape, grad=True) for name, shape in shapes.items()}
        names = [f"norms.{index}{gain}" for index in range(2 * blocks + 1)] if gain is not None else []
        self.gains = [draft.param(name, D, around=1.0, grad=True) for name in names]

    def embedded(self) -> Tensor:
        return self.draft.watch("input_embeddings", self.embed[self.ids])

    def norm(self, index: int, x: Tensor) -> Tensor:
        return rms(x, self.eps) * (self.gains[index] if self.gains else 1.0)

    def branch(self, index: int, x: Tensor) -> Tensor:
        u, block = self.norm(index, x), index // 2
        if index % 2:
            z = u @ self.weights[f"ffn{block}.w1"].T
            return (z * (1 + torch.erf(z / 2**0.5)) / 2) @ self.weights[f"ffn{block}.w2"].T
        q, k, v = (by_head(u @ self.weights[f"attn{block}.w{name}"].T, H) for name in "qkv")
        return attended(q, k, v, None) @ self.weights[f"attn{block}.wo"].T

    def finish(self, left: Tensor) -> Draft:
        return self.draft.backward(self.draft.output("logits", self.norm(len(self.gains) - 1, left) @ self.head.T))


def mixed(R: Tensor, S: Streams) -> Streams:
    return [weighted(numbers(R[..., i]), S) for i in range(len(S))]


def decoder(d: Draft, n: int, site: Callable[[int, Streams, Branch], Streams], mean: bool = False) -> Draft:
    """Runs copies of the embedding as streams through every site, and sums or averages them."""
    body = Body(d, BLOCKS, 1e-6, ".weight")
    streams = [body.embedded()] * n
    for index in range(2 * BLOCKS):
        streams = site(index, streams, functools.partial(body.branch, index))
        d.output(f"streams_{index}", torch.stack(streams, dim=-2))
    return body.finish(torch.stack(streams).sum(0) / (n if mean else 1))


def single_pass(n: int, rounds: int) -> Draft:
    d = Draft(f"mhc-v41-iters{rounds}-f64", sizes(n=n, sinkhorn_iters=rounds, hc_eps=1e-6, rms_eps=1e-20))
    body, form = Body(d, BLOCKS, 1e-20, ""), {**PRESETS["deepseek_v41"], "residual": "sinkhorn", "rounds": rounds}
    form["order"] = "destinations_first"
    streams, before = [body.embedded()] * n, torch.eye(n, dtype=torch.float64)[0]
    for s in range(2 * BLOCKS):
        rows = n * (n + 2)
        fn = d.matrix(f"sites.{s}.fn", rows, n * D, grad=True)
        base, scale = d.param(f"sites.{s}.base", rows, grad=True), d.param(f"sites.{s}.scale", 3, grad=True)
        z = rms(torch.cat(streams, -1), 1e-20) @ fn.T
        pre, post, comb = (scale.repeat_interleave(torch.tensor([n, n, n * n])) * z + base).split([n, n, n * n], -1)
        y = body.branch(s, d.output(f"branch_input_{s}", weighted(numbers(before.expand(B, T, n)), streams)))
        kept = mixed(stream_matrix(comb, form, n), streams)
        streams = [w * y + x for w, x in zip(numbers(2 * torch.sigmoid(post)), kept, strict=True)]
        before = d.output(f"pre_{s}", torch.sigmoid(pre) + 1e-6)
        d.output(f"streams_{s}", torch.stack(streams, dim=-2))
    return body.finish(d.output("collapsed", weighted(numbers(before), streams)))


def joint_hat(S: Streams, gamma: Tensor) -> Tensor:
    flat = torch.cat(S, -1)
    return flat / flat.norm(dim=-1, keepdim=True) * flat.shape[-1] ** 0.5 * (1 + gamma)


def relative(name: str, residual: str, n: int) -> Draft:
    """mHC-lite and KromHC."""
    d = Draft(name, sizes(n=n, norm_eps=1e-6))
    rows = math.factorial(n) if residual == "permutations" else 2 * int(math.log2(n))

    def site(index: int, S: Streams, f: Branch) -> Streams:
        hc = f"hc.{index}"
        hat = joint_hat(S, d.param(f"{hc}.norm.gamma", n * D, grad=True))
        alpha, beta = (
            d.param(f"{hc}.dynamic_{what}_fn", n * D, size, scale=(n * D) ** -0.5, grad=True)
            for what, size in (("alpha", n + rows), ("beta", n))
        )
        base, base_post = d.param(f"{hc}.static_alpha", n + rows, grad=True), d.param(f"{hc}.static_beta", n, grad=True)
        pre, residual_scale = (d.param(f"{hc}.{x}_scale", 1, around=1.0, grad=True) for x in ("pre_branch", "residual"))
        post = d.param(f"{hc}.h_post_scale", around=1.0, grad=True)
        read, matrix = (hat @ alpha).split([n, rows], -1)
        y = f(weighted(numbers(torch.sigmoid(pre * read + base[:n])), S))
        R = stream_matrix(residual_scale * matrix + base[n:], {"residual": residual}, n)
        writes = 2 * torch.sigmoid(post * (hat @ beta) + base_post)
        return [w * y + x for w, x in zip(numbers(writes), mixed(R, S), strict=True)]

    return decoder(d, n, site)


def spectral(n: int) -> Draft:
    d, k, m = Draft("mix-shc-f64", sizes(n=n, norm_eps=1e-6)), (n - 1) * (n - 2) // 2, n - 1

    def site(index: int, S: Streams, f: Branch) -> Streams:
        hc = f"hc.{index}"
        hat = joint_hat(S, d.param(f"{hc}.norm.gamma", n * D, grad=True))
        widths = {"pre": n, "residual": m * m}
        maps = {x: d.matrix(f"{hc}.to_alpha_{x}.weight", size, n * D, grad=True) for x, size in widths.items()}
        to_beta = d.matrix(f"{hc}.to_beta.weight", n, n * D, grad=True)
        static = d.param(f"{hc}.static_alpha_pre", n, 1, grad=True), d.param(f"{hc}.static_beta", n, grad=True)
        rest = d.param(f"{hc}.static_alpha_residual", m * m, grad=True)
        names = ("pre_branch_scale", "residual_rot_scale_u", "residual_rot_scale_v", "residual_val_scale", "gamma_u", "gamma_v")
        pre, u, v, val, gamma_u, gamma_v = (d.param(f"{hc}.{x}", 1, around=1.0, grad=True) for x in names)
        post = d.param(f"{hc}.h_post_scale", around=1.0, grad=True)
        scale = torch.cat((u.expand(k), v.expand(k), val.expand(m)))
        y = f(weighted(numbers(torch.sigmoid(pre * (hat @ maps["pre"].T) + static[0].view(-1))), S))
        logits = scale * (hat @ maps["residual"].T) + rest
        R = stream_matrix(logits, {"residual": "spectral"}, n, torch.cat((gamma_u, gamma_v)))
        writes = 2 * torch.sigmoid(post * (hat @ to_beta.T) + static[1])
        return [w * y + x for w, x in zip(numbers(writes), mixed(R, S), strict=True)]

    return decoder(d, n, site)


def depthbench_hyper(n: int) -> Draft:
    d = Draft("hc-depthbench-f64", sizes(n=n, reduce="mean", rms_eps=1e-8))

    def site(index: int, S: Streams, f: Branch) -> Streams:
        hc = f"hc.{index}"
        maps, map_b = (
            d.matrix(f"{hc}.dynamic_alpha_proj", D, n + 1, grad=True),
            d.param(f"{hc}.dynamic_beta_proj", D, grad=True),
        )
        s_a, s_b = (d.param(f"{hc}.dynamic_{x}_scale", around=1.0, grad=True) for x in ("alpha", "beta"))
        alpha, beta = d.param(f"{hc}.static_alpha", n, n + 1, grad=True), d.param(f"{hc}.static_beta", n, grad=True)
        hats = [rms(x, 1e-8) for x in S]
        rows = [numbers(s_a * torch.tanh(hat @ maps) + alpha[j]) for j, hat in enumerate(hats)]
        writes = [(beta[j] + s_b * torch.tanh(hat @ map_b)).unsqueeze(-1) for j, hat in enumerate(hats)]
        y = f(weighted([row[0] for row in rows], S))
        return [writes[i] * y + weighted([row[1 + i] for row in rows], S) for i in range(n)]

    return decoder(d, n, site, mean=True)


def depthbench_mhc(n: int, rounds: int) -> Draft:
    d = Draft("mhc-depthbench-f64", sizes(n=n, reduce="mean", sinkhorn_iters=rounds, rms_eps=1e-8))
    form = {
        "residual": "sinkhorn",
        "order": "destinations_first",
        "start": "exp",
        "rounds": rounds,
        "start_eps": 0,
        "sum_eps": 0,
    }

    def site(index: int, S: Streams, f: Branch) -> Streams:
        hat, found = rms(torch.cat(S, -1), 1e-8), []
        for name, shape in (("pre", (n,)), ("post", (n,)), ("residual", (n, n))):
            part = f"hc.{index}.{name}"
            maps = d.param(f"{part}_dynamic_proj", n * D, math.prod(shape), scale=(n * D) ** -0.5, grad=True)
            bias, gate = d.param(f"{part}_bias", *shape, grad=True), d.param(f"{part}_gate", around=1.0, grad=True)
            found.append(gate * torch.tanh(hat @ maps) + bias.flatten())
        y = f(weighted(numbers(torch.sigmoid(found[0])), S))
        kept = mixed(stream_matrix(found[2], form, n), S)
        return [w * y + x for w, x in zip(numbers(2 * torch.sigmoid(found[1])), kept, strict=True)]

    return decoder(d, n, site, mean=True)


def lanes(blocks: int, start: int, backout: int) -> Draft:
    given = sizes(parallel_start=start, backout_layer=backout) | {"blocks": blocks}
    d = Draft("lanes2-moddednanogpt-f64", given)
    body = Body(d, blocks, torch.finfo(torch.float64).eps, None)
    lam, xi = (d.param(f"lanes.{x}_lambda", 2 * blocks, around=1.0, grad=True) for x in ("resid", "x0"))
    w = d.param("lanes.w_post", 2 * blocks, 2, 1, around=1.0, grad=True)
    beta = d.param("lanes.backout_lambda", grad=True)
    x0 = body.norm(0, body.embedded())
    first = second = kept = x0
    for s in range(2 * blocks):
        if s == 2 * start:
            second = first
        y = body.branch(s, second if s % 2 and s >= 2 * start else first)
        y = y if s % 2 else y + xi[s] * x0
        first, second = lam[s] * first + w[s, 0] * y, lam[s] * second + w[s, 1] * y
        if s % 2:
            d.output(f"lane0_{s // 2}", first)
            kept = first if s // 2 == backout else kept
    return body.finish((first + second) / 2 - beta * kept)


MADE: dict[str, Callable[[], Draft]] = {
    "mhc-v41-iters3-f64": functools.partial(single_pass, 3, 3),
    "mix-lite-f64": functools.partial(relative, "mix-lite-f64", "permutations", 4),
    "mix-kromhc-f64": functools.partial(relative, "mix-kromhc-f64", "kronecker", 8),
    "mix-shc-f64": functools.partial(spectral, 3),
    "hc-depthbench-f64": functools.partial(depthbench_hyper, 3),
    "mhc-depthbench-f64": functools.partial(depthbench_mhc, 3, 5),
    "lanes2-moddednanogpt-f64": functools.partial(lanes, 4, 1, 2),
}
