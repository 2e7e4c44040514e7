"""Mixers along positions, inside sublayers and of single tokens, for rows of one document each.

Letters: B batch, T position, D width, C channels, H heads, G kv-heads, K key width, V value width, F hidden width.
"""

import math
from typing import Any

import torch
from torch import Tensor

from .depth_streams import convolved, shifted
from .ngrams import ngram_embedding as ngram_embedding
from .setting import part_of, rms

Weights = dict[str, Tensor]


def silu(z: Tensor) -> Tensor:
    return z * torch.sigmoid(z)


def rotated(x: Tensor, theta: float, width: int, scaling: Any = None) -> Tensor:
    """Turns the pairs (i, i + width / 2) of the first channels of every head [B T H K] by position times frequency."""
    first, rest = x[..., :width], x[..., width:]
    half = width // 2
    frequencies = torch.tensor([theta ** (-2 * i / width) for i in range(half)], dtype=x.dtype)
    magnitude = 1.0
    if scaling is not None:
        frequencies, magnitude = scaled_frequencies(frequencies, theta, scaling)
    angle = torch.arange(x.shape[1], dtype=x.dtype)[:, None, None] * frequencies
    turned = torch.view_as_complex(torch.stack((first[..., :half], first[..., half:]), dim=-1).contiguous())
    turned = turned * torch.polar(magnitude * torch.ones_like(angle), angle)
    return torch.cat((turned.real, turned.imag, rest), dim=-1)


def scaled_frequencies(frequencies: Tensor, theta: float, c: Any) -> tuple[Tensor, float]:
    """What is rotated by, and the factor of queries and keys."""
    if c.kind == "linear":
        return frequencies / c.factor, 1.0
    found, W, pairs = [], c.original_max_seq_len, len(frequencies)
    for i, f in enumerate(frequencies.tolist()):
        if c.kind == "llama3":
            wavelength = 2 * math.pi / f
            smooth = (W / wavelength - c.low_freq_factor) / (c.high_freq_factor - c.low_freq_factor)
            smooth = 0.0 if wavelength > W / c.low_freq_factor else 1.0 if wavelength < W / c.high_freq_factor else smooth
            found.append((1 - smooth) * f / c.factor + smooth * f)
            continue
        bounds = [pairs * math.log(W / (turns * 2 * math.pi)) / math.log(theta) for turns in (c.beta_fast, c.beta_slow)]
        if c.bounds == "whole":
            bounds = [math.floor(bounds[0]), math.ceil(bounds[1])]
        low, high = max(bounds[0], 0), min(bounds[1], 2 * pairs - 1)
        interpolated = min(max((i - low) / (high - low if high > low else 1e-3), 0.0), 1.0)
        found.append(f * (1 - interpolated) + f / c.factor * interpolated)
    factor = 1.0
    if c.kind == "yarn":
        factor = c.attention_factor or 0.1 * math.log(c.factor) + 1
    return torch.tensor(found, dtype=frequencies.dtype), factor


def attended(q: Tensor, k: Tensor, v: Tensor, window: int | None, sink: Tensor | None = None, chunked: bool = False) -> Tensor:
    """Softmax attention of [B T H K] queries over [B T G K] keys and values, heads side by side in the end.

    A sink has a score for each head, or for each token and head [B T H].
    """
    (_, T, H, K), G = q.shape, k.shape[2]
    rows = []
    for t in range(T):
        first = 0 if window is None else t // window * window if chunked else max(0, t - window + 1)
        heads = []
        for h in range(H):
            g = h // (H // G)
            scores = (k[:, first : t + 1, g] * q[:, t : t + 1, h]).sum(-1) / math.sqrt(K)
            weights = scores.exp()
            total = weights.sum(-1, keepdim=True)
            if sink is not None:
                total = total + (sink[h] if sink.ndim == 1 else sink[:, t, h, None]).exp()
            heads.append((weights / total).unsqueeze(1) @ v[:, first : t + 1, g])
        rows.append(torch.cat(heads, dim=-1))
    return torch.cat(rows, dim=1)


def canon(c: Any, p: Weights, x: Tensor) -> Tensor:
    assert p["weight"].shape[1] == c.kernel
    y = convolved(x, p["weight"]) + (p["bias"] if c.bias == "channel" else 0.0)
    y = silu(y) if c.activation == "silu" else y
    y = x + y if c.form == "residual" else y
    return y / math.sqrt(c.kernel + 1) if getattr(c, "scale", "none") == "unit_variance" else y


def dynamic_conv(c: Any, p: Weights, x: Tensor, context: Tensor | None = None) -> Tensor:
    n, k, C = x if context is None else context, c.kernel, x.shape[-1]
    assert p["static"].shape == (k, C)
    y = x if c.form == "residual" else torch.zeros_like(x)
    for s in range(k):
        if c.taps == "low_rank":
            assert p["up"].shape == (k, c.rank, C)
            made = (n @ p["factors.weight"].T) @ p["up"][s]
        else:
            # The taps of one head stand together, the current token's first.
            heads = p["heads.weight"].unflatten(0, (C // c.head_dim, k))[:, s]
            made = (n @ heads.T).repeat_interleave(c.head_dim, dim=-1)
        y = y + (made + p["static"][s]) * shifted(x, s)
    return y / math.sqrt(2 * k + (c.form == "residual")) if c.scale == "unit_variance" else y


def token_shift(c: Any, p: Weights, x: Tensor) -> Tensor:
    return x + p["mu"] * (shifted(x, 1) - x)


def smear(c: Any, p: Weights, x: Tensor) -> Tensor:
    if c.form == "channel":
        gate = torch.sigmoid(p["share"])
        return (1 - gate) * x + gate * shifted(x, 1)
    assert p["gate"].shape == (c.gate_channels,)
    opened = torch.sigmoid((x[..., : c.gate_channels] * p["gate"]).sum(-1, keepdim=True))
    return x + p["strength"] * opened * shifted(x, 1)


def local_swa(c: Any, p: Weights, x: Tensor) -> Tensor:
    H, G, K = c.n_heads, c.n_kv_heads, c.head_dim
    q, k, v = (x @ p["qkv.weight"].T).unflatten(-1, (H + 2 * G, K)).split((H, G, G), dim=2)
    q, k = (rotated(y, c.rope_theta, K) for y in (q, k))
    y = attended(q, k, v, c.window, chunked=c.window_kind == "chunk") @ p["output.weight"].T
    y = x + y if c.form == "residual" else y
    return silu(y) if c.activation == "silu" else y


def branch_swa(c: Any, p: Weights, x: Tensor, parts: Any = None) -> Tensor:
    heads = parts or c.parts or [(1, x.shape[-1])]
    branches = [part.unflatten(-1, (n, w)) for part, (n, w) in zip(x.split([n * w for n, w in heads], -1), heads, strict=True)]
    queries, keys = branches, branches
    if c.scores == "shared":
        q, k = (rotated(y, c.rope_theta, y.shape[-1]) for y in branches[:2])
        queries, keys = [q] * 3, [k] * 3
    mixed = [
        attended(q, k, u, c.window, chunked=c.window_kind == "chunk") for q, k, u in zip(queries, keys, branches, strict=True)
    ]
    if c.form == "blend":
        mixed = [u.flatten(2) + g * (m - u.flatten(2)) for u, m, g in zip(branches, mixed, p["gamma"], strict=True)]
    y = torch.cat(mixed, dim=-1) + (x if c.form == "residual" else 0.0)
    return silu(y) if c.activation == "silu" else y


def locally(c: Any, p: Weights, place: str, x: Tensor, context: Tensor, parts: Any = None) -> Tensor:
    """What the local mixer of a place makes of its channels, which may be heads of some widths side by side.

    Of some, the context makes the weights.
    """
    local = getattr(c, place)
    if local is None:
        return x
    if local.kind == "branch_swa":
        return branch_swa(local, part_of(p, f"{place}."), x, parts)
    equation, given = LOCALS[local.kind], (context,) if local.kind == "dynamic_conv" else ()
    if getattr(c, "projected_over", "joint") == "branch" and place == "projected_local":
        branches = x.split([heads * width for heads, width in parts], dim=-1)
        mixed = [equation(local, part_of(p, f"{place}.mixers.{n}."), one, *given) for n, one in enumerate(branches)]
        return torch.cat(mixed, dim=-1)
    return equation(local, part_of(p, f"{place}."), x, *given)


LOCALS: dict[str, Any] = {
    "canon": canon,
    "dynamic_conv": dynamic_conv,
    "local_swa": local_swa,
    "smear": smear,
    "token_shift": token_shift,
}


def attention(c: Any, p: Weights, x: Tensor, eps: float) -> Tensor:
    H, G = c.n_heads, c.n_kv_heads or c.n_heads
    K, D = c.head_dim or x.shape[-1] // H, x.shape[-1]
    sink = {"none": None, "learned": p.get("sink"), "per_token": x @ p["sink_weight"].T if "sink_weight" in p else None}[c.sink]
    assert (sink is None) == (c.sink == "none")
    n, x = x, locally(c, p, "input_local", x, x)
    projected = x @ p["qkv.weight"].T + (p["qkv_bias"] if c.bias != "none" else 0.0)
    q, k, v = projected.unflatten(-1, (H + 2 * G, K)).split((H, G, G), dim=2)
    if c.kind == "kv_shift":
        k, v = with_token_before(c, p, x, k, v)

    def normalised(y: Tensor, gain: Tensor) -> Tensor:
        if c.qk_norm_over == "head":
            return rms(y, eps) * gain
        return (rms(y.flatten(2), eps) * gain).unflatten(-1, (-1, K))

    if c.qk_norm in ("before_rope", "key_after_rope"):
        q = normalised(q, p["q_gain"])
    if c.qk_norm == "before_rope":
        k = normalised(k, p["k_gain"])
    branches, chosen = {"q": q, "k": k, "v": v}, c.projected_branches
    widths = [(branches[b].shape[2], K) for b in chosen]
    mixed = locally(c, p, "projected_local", torch.cat([branches[b] for b in chosen], dim=2).flatten(2), n, widths)
    parts = mixed.unflatten(-1, (-1, K)).split([heads for heads, _ in widths], dim=2)
    q, k, v = (branches | dict(zip(chosen, parts, strict=True))).values()
    if c.qk_norm == "after_local":
        q, k = normalised(q, p["q_gain"]), normalised(k, p["k_gain"])
    width = K if c.rope_dim is None else c.rope_dim
    q, k = (rotated(y, c.rope_theta, width, c.rope_scaling) for y in (q, k)) if width else (q, k)
    if c.qk_norm == "after_rope":
        q = normalised(q, p["q_gain"])
    if c.qk_norm in ("after_rope", "key_after_rope"):
        k = normalised(k, p["k_gain"])
    y = attended(q, k, v, c.window, sink)
    assert p["output.weight"].shape == (D, H * K)
    y = y @ p["output.weight"].T + (p["output_bias"] if c.bias == "all" else 0.0)
    return locally(c, p, "update_local", y, n)


short_swa = kv_shift = attention


def with_token_before(c: Any, p: Weights, x: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [B T G K] mixed with those of the token before."""
    both, G = torch.cat((k, v), dim=2), k.shape[2]
    if c.form == "fixed":
        before, own = p["shift"].unsqueeze(-1).unbind(1)
    else:
        before = torch.sigmoid(x @ p["shift_weight"].T).unsqueeze(-1)
        own = 1 - before
    mixed = before * shifted(both, 1) + own * both
    return mixed[:, :, :G], mixed[:, :, G:]


def short_conv(c: Any, p: Weights, x: Tensor, eps: float) -> Tensor:
    return canon(c, part_of(p, "conv."), x)


def path_attention(c: Any, p: Weights, x: Tensor, eps: float) -> Tensor:
    H, D = c.n_heads, x.shape[-1]
    G, K = c.n_kv_heads or H, c.head_dim or D // H
    q, k, v = (x @ p["qkv.weight"].T).unflatten(-1, (H + 2 * G, K)).split((H, G, G), dim=2)
    if c.qk_norm == "per_head":
        q, k = rms(q, eps) * p["q_gain"], rms(k, eps) * p["k_gain"]
    if c.w_map == "low_rank":
        assert p["w_down.weight"].shape == (c.w_rank, D)
    low = x @ p["w_down.weight"].T if c.w_map == "low_rank" else x
    assert p["taps"].shape == (G * K, c.w_kernel)
    w = silu(convolved(low @ p["w_up.weight"].T, p["taps"])).unflatten(-1, (G, K))
    w = w / (w.square().sum(-1, keepdim=True) + c.w_eps).sqrt()
    gates = torch.sigmoid(x @ p["gates"].T + p["gate_bias"])
    beta, rows = 2 * gates[..., :G], []
    assert (gates.shape[-1] == G + H) == (c.forget_gate == "inside_scale")
    for t in range(x.shape[1]):
        heads = []
        for h in range(H):
            g, query, forgotten, scores = h // (H // G), q[:, t, h], torch.zeros(x.shape[0], dtype=x.dtype), []
            for j in range(t, -1, -1):
                scores.append(((query * k[:, j, g]).sum(-1) + forgotten) / math.sqrt(K))
                # From here on the query has passed token j.
                query = query - (beta[:, j, g] * (query * w[:, j, g]).sum(-1)).unsqueeze(-1) * w[:, j, g]
                forgotten = forgotten + (gates[:, j, G + h].log() if gates.shape[-1] > G else 0.0)
            weights = torch.stack(scores[::-1], dim=-1).exp()
            heads.append((weights.unsqueeze(-1) * v[:, : t + 1, g]).sum(1) / weights.sum(-1, keepdim=True))
        rows.append(torch.cat(heads, dim=-1))
    return torch.stack(rows, dim=1) @ p["output.weight"].T


def gated_short_conv(c: Any, p: Weights, x: Tensor, eps: float) -> Tensor:
    assert p["taps"].shape == (x.shape[-1], c.kernel)
    before, behind, z = (x @ p["gates_and_input.weight"].T).chunk(3, dim=-1)
    return (behind * convolved(before * z, p["taps"])) @ p["output.weight"].T


def gated_delta_net(c: Any, p: Weights, x: Tensor, eps: float) -> Tensor:
    H, D = c.n_heads, x.shape[-1]
    K = c.head_dim or D // H
    V = c.value_dim or 2 * K
    n, x = x, locally(c, p, "input_local", x, x)
    channels = locally(c, p, "projected_local", x @ p["qkv.weight"].T, n, [(H, K), (H, K), (H, V)])
    q, k, v = (part.unflatten(-1, (H, -1)) for part in channels.split((H * K, H * K, H * V), dim=-1))
    q, k = (y / (y.square().sum(-1, keepdim=True) + c.qk_eps).sqrt() for y in (q, k))
    decay, write = (x @ p["decay_and_beta"].T).chunk(2, dim=-1)
    kept = torch.exp(-torch.exp(p["A_log"]) * torch.log1p(torch.exp(decay + p["dt_bias"])))
    beta = 1 / (1 + torch.exp(-write))
    S, rows = torch.zeros(*x.shape[:1], H, V, K, dtype=x.dtype), []
    for t in range(x.shape[1]):
        a, b, key = kept[:, t, :, None, None], beta[:, t, :, None, None], k[:, t]
        S = a * (S - b * torch.einsum("bhvk,bhk->bhv", S, key).unsqueeze(-1) * key.unsqueeze(-2))
        S = S + b * v[:, t].unsqueeze(-1) * key.unsqueeze(-2)
        rows.append(rms(torch.einsum("bhvk,bhk->bhv", S, q[:, t]) / math.sqrt(K), eps) * p["gain"])
    y = (torch.stack(rows, dim=1).flatten(2) * silu(x @ p["gate.weight"].T)) @ p["output.weight"].T
    return locally(c, p, "update_local", y, n)


def hidden(c: Any, p: Weights, x: Tensor, first: str) -> Tensor:
    """What goes into the activation of a feed-forward."""
    return locally(c, p, "projected_local", locally(c, p, "input_local", x, x) @ p[f"{first}.weight"].T, x)


def swiglu(c: Any, p: Weights, x: Tensor, eps: float) -> Tensor:
    gate, up = hidden(c, p, x, "gate_up").chunk(2, dim=-1)
    return locally(c, p, "update_local", (silu(gate) * up) @ p["down.weight"].T, x)


def gelu(c: Any, p: Weights, x: Tensor, eps: float) -> Tensor:
    z = hidden(c, p, x, "up")
    inner = math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)
    phi = (1 + torch.erf(z / math.sqrt(2))) / 2 if c.form == "erf" else (1 + torch.tanh(inner)) / 2
    return locally(c, p, "update_local", (z * phi) @ p["down.weight"].T, x)


def relu2(c: Any, p: Weights, x: Tensor, eps: float) -> Tensor:
    return locally(c, p, "update_local", hidden(c, p, x, "up").clamp(min=0).square() @ p["down.weight"].T, x)
