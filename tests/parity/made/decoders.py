"""Llama decoders at other shapes: with Canon layers, and with a window in every attention.

Letters: B batch, T position, D width, H heads, G kv-heads, K key width, F hidden width.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from ...conformance.values.depth_routes import by_head
from ...conformance.values.depth_streams import convolved
from ...conformance.values.sequence import attended, rotated, silu
from ...conformance.values.setting import rms
from .draft import Draft

V, B, T, D, H, G, K, F, LAYERS, EPS, THETA = 11, 3, 7, 10, 4, 2, 6, 9, 2, 1e-5, 300.0
SIZES = {
    "vocab_size": V,
    "hidden_size": D,
    "intermediate_size": F,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": H,
    "num_key_value_heads": G,
    "head_dim": K,
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
}


def llama(d: Draft, window: int | None, places: str = "", rope_dim: int = K, qk_norm: bool = False) -> Draft:
    """The whole decoder; `places` are those of Canon layers."""
    config, ids = d.config, d.tokens("input_ids", V, B, T)
    embed = d.param("model.embed_tokens.weight", V, D)
    x = d.watch("input_embeds", embed[ids])
    d.keep("input/inputs_embeds", x)

    def normed(name: str, y: Tensor) -> Tensor:
        return rms(y, EPS) * d.param(f"{name}.weight", y.shape[-1], around=1.0, grad=True)

    def canon(place: str, name: str, y: Tensor) -> Tensor:
        if place not in places:
            return y
        taps = d.param(f"{name}.weight", y.shape[-1], 1, config.get("canon_kernel", 4), grad=True)
        c = convolved(y, taps[:, 0])
        c = silu(c) if config.get("canon_activation") else c
        return y + c if config.get("canon_residual", True) else c

    for i in range(LAYERS):
        d.output(f"hidden_{i}", x)
        layer = f"model.layers.{i}"
        u = canon("A", f"{layer}.canonA", normed(f"{layer}.input_layernorm", x))
        parts = {"q": H * K, "k": G * K, "v": G * K}
        q, k, v = (u @ d.matrix(f"{layer}.self_attn.{n}_proj.weight", width, D, grad=True).T for n, width in parts.items())
        if qk_norm:
            q, k = (normed(f"{layer}.self_attn.{n}_norm", y) for n, y in (("q", q), ("k", k)))
        q, k, v = canon("B", f"{layer}.self_attn.canonB", torch.cat((q, k, v), -1)).split(list(parts.values()), -1)
        q, k = (rotated(by_head(y, n), THETA, rope_dim) for y, n in ((q, H), (k, G)))
        y = attended(q, k, by_head(v, G), window)
        x = x + y @ d.matrix(f"{layer}.self_attn.o_proj.weight", D, H * K).T
        u = canon("C", f"{layer}.canonC", normed(f"{layer}.post_attention_layernorm", x))
        gate_up = torch.cat([u @ d.matrix(f"{layer}.mlp.{n}_proj.weight", F, D).T for n in ("gate", "up")], -1)
        gate, up = canon("D", f"{layer}.mlp.canonD", gate_up).chunk(2, -1)
        x = x + (silu(gate) * up) @ d.matrix(f"{layer}.mlp.down_proj.weight", D, F).T
    x = d.output(f"hidden_{LAYERS}", normed("model.norm", x))
    logits = d.output("logits", x @ d.param("lm_head.weight", V, D).T)
    return d.backward(logits, "cotangent_logits")


def canon(places: str, **options: Any) -> Draft:
    name = {"ABCD": "canon-abcd", "AC": "canon-ac", "B": "canon-b-act-nores"}[places]
    d = Draft(name, {**SIZES, "canon_set": places, "qk_norm": True, "rope_dim": 2, **options})
    return llama(d, None, places, rope_dim=2, qk_norm=True)


def mistral(window: int) -> Draft:
    splits = ["[4, 1, 2]", "[1, 1, 1, 1, 1, 1, 1]"]
    about = {"cached_decode_max_abs_diff_by_chunking": dict.fromkeys(splits, 0.0), "cached_kv_length_after_decode": window - 1}
    return llama(Draft("swa-mistral", {**SIZES, "sliding_window": window}, **about), window)


MADE = {
    "canon-abcd": functools.partial(canon, "ABCD"),
    "canon-ac": functools.partial(canon, "AC"),
    "canon-b-act-nores": functools.partial(canon, "B", canon_activation=True, canon_residual=False, canon_kernel=3),
    "swa-mistral": functools.partial(mistral, 3),
}
