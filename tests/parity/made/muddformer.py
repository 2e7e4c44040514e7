"""Float64 twins of the two fixtures of MUDDFormer's training code, which ran in float32 alone, and the same at other shapes.

Letters: B batch, T position, D width, H heads, K head width, S sources, C ways.
"""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...conformance.values.depth_routes import by_head
from ...conformance.values.sequence import attended, rotated, silu
from ...conformance.values.setting import rms, weighted
from ..golden import Golden
from .draft import Draft

KEPT = Path(__file__).parents[1] / "fixtures"
DEPTHWISE = ("dense_proj2.bias", "dynamic_dense_conn", "pre_dense_proj1_norm", "mudd_p")
"""What the stored gradients are of, besides the embedding."""

Take = Callable[[str, tuple[int, ...]], Tensor]


def decoder(d: Draft, ids: Tensor, take: Take) -> Tensor:
    """Logits of the training code; `take` gives a parameter by its name and shape."""
    c = d.config
    D, L, H, K, eps = (
        c[n]
        for n in ("base_emb_dim", "base_num_decoder_layers", "base_num_query_heads", "head_dim", "normalization_layer_epsilon")
    )
    normed = c["mudd_prenorm"]

    def norm(name: str, x: Tensor, eps: float = eps) -> Tensor:
        return rms(x, eps) * take(f"{name}/scale", (x.shape[-1],))

    X = take("token_embedder/embedding", (c["vocab_size"], D))[ids]
    hats = [norm("mudd_prenorm", X) if normed else X]
    ways = [X] * 4
    for i in range(L):
        layer = f"layers_{i}"
        q, k, v = (
            by_head(
                norm(f"{layer}/pre_self_attention_layer_norm_{n}", x)
                @ take(f"{layer}/self_attention/{name}/kernel", (D, H, K)).flatten(1),
                H,
            )
            for n, name, x in zip("qkv", ("query", "key", "value"), ways, strict=False)
        )
        q, k = (rotated(y, c["rope_max_timescale"], K) for y in (q, k))
        U = ways[3] + attended(q, k, v, None) @ take(f"{layer}/self_attention/out/kernel", (H, K, D)).flatten(0, 1)
        u, F = norm(f"{layer}/post_self_attention_layer_norm", U), _hidden(c, i)
        gate, up = (u @ take(f"{layer}/mlp/{n}/kernel", (D, F)) for n in ("wi_0", "wi_1"))
        X = U + (silu(gate) * up) @ take(f"{layer}/mlp/wo/kernel", (F, D))
        hats.append(norm(f"mudd_prenorm_{i}", X) if normed else X)
        C, S = (1 if i == L - 1 else 4), i + 2
        width = (C * S * c["dynamic_dense_hidden_expand"][i] // 64 + 1) * 64
        unit = norm(f"{layer}/pre_dense_proj1_norm", X, 1e-6) if normed else rms(X, 1e-6)
        z = unit @ take(f"{layer}/dynamic_dense_conn1/kernel", (D, width))
        z = z * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (z + 0.044715 * z**3))) / 2
        weights = torch.einsum("btk,kcs->btcs", z, take(f"{layer}/dynamic_dense_conn2/kernel", (width, C, S)))
        weights = weights + take(f"{layer}/dense_proj2.bias", (C, S))
        sums = [weighted(weights[..., way, :].unsqueeze(-2).unbind(-1), hats) for way in range(C)]
        if normed:
            sums = [X + one for one in sums[:-1]] + [X + norm(f"mudd_postnorm_{i}", sums[-1])]
        ways = sums
    return norm("decoder_norm", ways[-1]) @ take("logits_dense/kernel", (D, c["vocab_size"]))


def _hidden(c: Mapping[str, Any], layer: int) -> int:
    return max(128, round(c["base_mlp_dim"] * (layer / (c["base_num_decoder_layers"] - 1) + 0.5) / 128) * 128)


def _wanted(name: str) -> str | None:
    if name == "token_embedder/embedding":
        return "grad/token_embedder/embedding"
    return f"grad/decoder/{name}" if any(part in name for part in DEPTHWISE) else None


def twin(kind: str) -> Draft:
    """The stored parameters, tokens and cotangent, widened."""
    stored = Golden.read(KEPT / f"muddformer-jax-{kind}-f32.json")
    d = Draft(f"muddformer-jax-{kind}-f64", stored.about["config"])

    def take(name: str, shape: tuple[int, ...]) -> Tensor:
        whole = f"param/{name}" if name.startswith("token_embedder") else f"param/decoder/{name}"
        assert stored.tensors[whole].shape == shape, name
        return d.keep(whole, stored.take(whole).double().requires_grad_(), _wanted(name))

    logits = d.output("logits", decoder(d, d.keep("input/input_ids", stored.take("input/input_ids")), take))
    cotangent = d.keep("input/cotangent", stored.take("input/cotangent").double())
    return d.finish((logits * cotangent).sum())


def other_shape(kind: str) -> Draft:
    """Three layers of another width."""
    normed = kind == "prepostnorm"
    config = {
        "base_emb_dim": 12,
        "base_num_query_heads": 2,
        "base_mlp_dim": 256,
        "base_num_decoder_layers": 3,
        "head_dim": 4,
        "vocab_size": 9,
        "normalization_layer_epsilon": 1e-5,
        "rope_max_timescale": 200,
        "qk_norm": False,
        "dynamic_dense_hidden_expand": [1, 1, 2],
        "dynamic_dense_hidden_round": True,
        "mudd_prenorm": normed,
        "mudd_postnorm": normed,
        "dynamic_mlp_dim": True,
    }
    d = Draft(f"muddformer-jax-{kind}-f64", config)

    def take(name: str, shape: tuple[int, ...]) -> Tensor:
        whole = name if name.startswith("token_embedder") else f"decoder/{name}"
        value = d.param(whole, *shape, around=float(name.endswith("/scale")), scale=0.5 if len(shape) < 2 else shape[0] ** -0.5)
        return d.keep(f"param/{whole}", value, _wanted(name))

    return d.backward(d.output("logits", decoder(d, d.tokens("input_ids", 9, 3, 5), take)))


TWINS = {f"muddformer-jax-{kind}-f64": functools.partial(twin, kind) for kind in ("nonorm", "prepostnorm")}
MADE = {
    **TWINS,
    **{
        f"muddformer-jax-{kind}-f64 of another shape": functools.partial(other_shape, kind)
        for kind in ("nonorm", "prepostnorm")
    },
}
