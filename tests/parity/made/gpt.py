"""The small GPT of the DenseFormer code, with biases, around its rows, its groups and its two baselines; and the rows alone.

Letters: B batch, T position, D width, H heads.
"""

import functools

import torch
from torch import Tensor

from ...conformance.values.sequence import attended
from ...conformance.values.setting import layer, weighted
from .draft import Draft

V, B, T, D, H = 13, 3, 5, 12, 3


class Body:
    """Blocks of LayerNorm, attention with rotary pairs side by side, and exact GELU; all with biases."""

    def __init__(self, draft: Draft, root: str, blocks: list[str]) -> None:
        self.draft, self.blocks = draft, blocks
        d = draft
        self.wte = d.param(f"{root}wte.weight", V, D, grad=True)
        self.last = self._affine(f"{root}ln_f", D)
        self.parts = {block: self._block(block) for block in blocks}
        frequencies = 100.0 ** (-torch.arange(0, D // H, 2, dtype=torch.float64) / (D // H))
        angles = torch.arange(T, dtype=torch.float64)[:, None] * d.keep("buffer/freqs", frequencies)
        self.turn = torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
        self.ids = d.tokens("ids", V, B, T)
        self.x0 = d.watch("x0", self.wte[self.ids])

    def _affine(self, name: str, width: int, columns: int | None = None) -> tuple[Tensor, Tensor]:
        weight = self.draft.param(f"{name}.weight", width, around=1.0) if columns is None else None
        weight = self.draft.matrix(f"{name}.weight", width, columns) if columns is not None else weight
        assert weight is not None
        return weight, self.draft.param(f"{name}.bias", width)

    def _block(self, block: str) -> dict[str, tuple[Tensor, Tensor]]:
        sizes = {"attn.c_attn": (3 * D, D), "attn.c_proj": (D, D), "mlp.c_fc": (4 * D, D), "mlp.c_proj": (D, 4 * D)}
        norms = {name: self._affine(f"{block}.{name}", D) for name in ("ln_1", "ln_2")}
        return norms | {name: self._affine(f"{block}.{name}", *size) for name, size in sizes.items()}

    def _linear(self, block: str, name: str, x: Tensor) -> Tensor:
        weight, bias = self.parts[block][name]
        return x @ weight.T + bias

    def attention(self, block: str, x: Tensor) -> Tensor:
        gain, bias = self.parts[block]["ln_1"]
        projected = self._linear(block, "attn.c_attn", layer(x, 1e-5) * gain + bias)
        q, k, v = (y.unflatten(-1, (H, -1)) for y in projected.chunk(3, dim=-1))
        q, k = (torch.view_as_real(torch.view_as_complex(y.unflatten(-1, (-1, 2))) * self.turn).flatten(-2) for y in (q, k))
        return self._linear(block, "attn.c_proj", attended(q, k, v, None))

    def feed_forward(self, block: str, x: Tensor) -> Tensor:
        gain, bias = self.parts[block]["ln_2"]
        z = self._linear(block, "mlp.c_fc", layer(x, 1e-5) * gain + bias)
        return self._linear(block, "mlp.c_proj", z * (1 + torch.erf(z / 2**0.5)) / 2)

    def block(self, block: str, x: Tensor) -> Tensor:
        x = x + self.attention(block, x)
        return x + self.feed_forward(block, x)

    def finish(self, x: Tensor) -> Draft:
        gain, bias = self.last
        return self.draft.backward(self.draft.output("logits", (layer(x, 1e-5) * gain + bias) @ self.wte.T))


def config(n_layer: int, **more: object) -> dict[str, object]:
    sizes = {"n_embd": D, "n_head": H, "n_layer": n_layer, "vocab_size": V, "bias": True, "increase_T_every": 1}
    return {**sizes, "dilation_factor": 1, "B": B, "T": T, **more}


def package(k: int, p: int, n: int) -> Draft:
    d = Draft(f"denseformer-lm-{k}x{p}", config(n, dilation=k, period=p), variant=f"lm-{k}x{p}")
    body = Body(d, "gpt.transformer.", [f"gpt.transformer.h.{b}" for b in range(n)])
    x = d.output("block.0", body.x0)
    outputs = [x]
    for i, block in enumerate(body.blocks, start=1):
        outputs.append(d.output(f"block.{i}", body.block(block, x)))
        x = outputs[-1]
        if i % p == 0:
            row = outputs[i % k :: k]
            x = weighted(d.param(f"dwa.alphas.{i - 1}.weight", 1, len(row), grad=True)[0], row)
        d.output(f"dwa.{i}", x)
    return body.finish(x)


def groups(size: int, k: int, n_groups: int, last: bool = False) -> Draft:
    """The training code: outputs of groups are stored; or the baseline with one mixture at the end."""
    variant = "connecttolast" if last else "exp-1x1" if size == 1 else f"exp-group{size}-k{k}"
    d = Draft(f"denseformer-{variant}", config(size * n_groups, increase_T_every=size, dilation_factor=k), variant=variant)
    body = Body(d, "transformer.", [f"transformer.h.{g}.{b}" for g in range(n_groups) for b in range(size)])
    x = d.output("block.0", body.x0)
    stored = [x]
    for g in range(n_groups):
        d.output(f"group_input.{g}", x)
        for b in range(size):
            x = d.output(f"block.{g * size + b + 1}", body.block(body.blocks[g * size + b], x))
        stored.append(x)
        if not last:
            row = stored[(g + 1) % k :: k]
            x = weighted(_row(d, [f"weights.{g}.weight"], (1, len(row)))[0][0], row)
    if last:
        x = weighted(_row(d, [f"mixer.weight.{i}" for i in range(n_groups + 1)], (1,)), stored)
    return body.finish(d.output("group_input.final", x))


def _row(d: Draft, names: list[str], shape: tuple[int, ...]) -> list[Tensor]:
    """Weights away from their start, which is a one on the newest and the authors' number on the others."""
    older = 1e-4 if len(names) > 1 else 0.0
    flat = torch.full((len(names) * shape[-1],), older, dtype=torch.float64)
    flat[-1] = 1.0
    for name, start in zip(names, flat.view(len(names), *shape), strict=True):
        d.keep(f"init/{name}", start)
    return [d.param(name, *shape, grad=True) for name in names]


def skip_gains(n: int) -> Draft:
    d = Draft("denseformer-skipgains", config(n), variant="skipgains")
    body = Body(d, "transformer.", [f"transformer.h.{b}" for b in range(n)])
    x = d.output("block.0", body.x0)
    for i, block in enumerate(body.blocks):
        d.output(f"group_input.{i}", x)
        for name, branch in (("attn", body.attention), ("mlp", body.feed_forward)):
            d.keep(f"init/{block}.gain_{name}", torch.ones(1, dtype=torch.float64))
            x = d.param(f"{block}.gain_{name}", 1, around=1.0, grad=True) * x + branch(block, x)
        d.output(f"block.{i + 1}", x)
    return body.finish(d.output("group_input.final", x))


def rows_alone(k: int, p: int, n: int) -> Draft:
    d = Draft(f"denseformer-op-{k}x{p}", {"dilation": k, "period": p, "n_blocks": n, "B": B, "T": T, "d": 3})
    x = [d.input(f"x.{i}", B, T, 3, grad=f"x.{i}") for i in range(n + 1)]
    total = torch.zeros((), dtype=torch.float64)
    for i in range(1, n + 1):
        y = x[i]
        if i % p == 0:
            row = x[i % k : i + 1 : k]
            y = weighted(d.param(f"alphas.{i - 1}.weight", 1, len(row), grad=True)[0], row)
        d.output(f"y.{i}", y * 1.0)
        total = total + (y * d.keep(f"input/cotangent.{i}", d.draw(B, T, 3))).sum()
    return d.finish(total)


MADE = {
    "denseformer-lm-1x1": functools.partial(package, 1, 1, 3),
    "denseformer-lm-2x3": functools.partial(package, 2, 3, 7),
    "denseformer-exp-1x1": functools.partial(groups, 1, 1, 3),
    "denseformer-exp-group2-k2": functools.partial(groups, 2, 2, 3),
    "denseformer-connecttolast": functools.partial(groups, 1, 1, 3, last=True),
    "denseformer-skipgains": functools.partial(skip_gains, 3),
    "denseformer-op-3x2": functools.partial(rows_alone, 3, 2, 5),
}
