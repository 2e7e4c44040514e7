"""Single operators: reads of Attention Residuals, generalised residuals, convex sums, convolutions, attention.

Letters: B batch, T position, D width, H heads, G kv-heads, K key width, S sources.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from ...conformance.values.depth_routes import by_head, softmax_mixture
from ...conformance.values.depth_streams import convolved, shifted
from ...conformance.values.sequence import attended, rotated, silu
from ...conformance.values.setting import rms, weighted
from .draft import Draft

B = 3


def attnres_op(output_norm: bool) -> Draft:
    n, T, D, eps, scale = (3, 4, 10, 1e-4, 0.3) if output_norm else (6, 3, 14, 1e-5, 1.0)
    shape = (1, D) if output_norm else (D,)
    sizes = {"n_sources": n, "rms_eps": eps, "scale": scale, "output_norm": output_norm, "query_shape": list(shape)}
    d = Draft("attnres-op-onorm" if output_norm else "attnres-op", sizes)
    sources = [d.input(f"residual_{i}", B, T, D, grad=f"residual_{i}") for i in range(n)]
    query, gain = d.param("query", *shape, grad=True), d.param("rms_weight", D, around=1.0, grad=True)
    scores = torch.stack([scale * (rms(v, eps) * gain * query.flatten()).sum(-1) for v in sources])
    p = d.output("p", scores.softmax(0))
    mixed = weighted(p.unsqueeze(-1), sources)
    if output_norm:
        mixed = rms(mixed, eps) * d.param("output_rms_weight", D, around=1.0, grad=True)
    return d.backward(d.output("o", mixed))


def mhar_op() -> Draft:
    n, T, D, H, eps = 4, 3, 12, 3, 1e-3
    d = Draft("mhar-op", {"N": n, "B": B, "T": T, "d": D, "heads": H, "eps": eps})
    sources = d.input("sources", n, B, T, D, grad="sources")
    query, gain = d.param("query", D, grad=True), d.param("rms_weight", D, around=1.0, grad=True)
    scores = [by_head(query * gain * rms(v, eps), H).sum(-1) for v in sources]
    d.output("p", torch.stack(scores).softmax(0))
    return d.backward(d.output("o", softmax_mixture(scores, [by_head(v, H) for v in sources])))


def attnres_two_phase() -> Draft:
    n, S, T, D, eps = 3, 4, 2, 6, 1e-5
    d = Draft("attnres-twophase-op", {"N_sources": n, "S_queries": S, "B": B, "T": T, "d": D, "eps": eps})
    queries, sources, partial = d.param("pseudo_queries", S, D), d.input("block_reps", n, B, T, D), d.input("partial", B, T, D)
    found: dict[str, list[Tensor]] = {"o": [], "max": [], "sumexp": []}
    for i, query in enumerate(queries):
        logits = torch.stack([(query * rms(v, eps)).sum(-1) for v in sources])
        last = (query * rms(partial, eps)).sum(-1)
        largest = logits.max(0).values
        terms = (logits - largest).exp()
        for name, value in (("o", weighted(terms.unsqueeze(-1), sources)), ("max", largest), ("sumexp", terms.sum(0))):
            found[name].append(value)
        d.output(f"interblock_only_{i}", weighted(logits.softmax(0).unsqueeze(-1), sources))
        whole = torch.cat((logits, last.unsqueeze(0))).softmax(0)
        d.output(f"merged_{i}", weighted(whole.unsqueeze(-1), [*sources, partial]))
    for name, values in found.items():
        d.output(f"phase1_{name}", torch.stack(values))
    return d


def inkling2(n_queries: int) -> Draft:
    n, T, D, eps = 2, 3, 6, 1e-4
    sizes = {"B": B, "T": T, "d": D, "blocks": n, "num_queries": n_queries, "eps": eps}
    d = Draft("attnres-inkling2-op", sizes)
    blocks, partial = d.input("block_states", B, T, n, D, grad="block_states"), d.input("partial", B, T, D, grad="partial")
    query = d.param("query", n_queries, D, grad=True)
    units = [rms(v, eps) for v in (*blocks.unbind(-2), partial)]
    reads = [
        softmax_mixture([(q * u).sum(-1, keepdim=True) / D**0.5 for u in units], [by_head(u, 1) for u in units]) for q in query
    ]
    return d.backward(d.output("y", torch.stack(reads)))


def dca_grn(mode: str, ways: int = 1) -> Draft:
    n, T, D, eps = (6, 2, 5, torch.finfo(torch.float64).eps) if ways == 1 else (2, 3, 7, torch.finfo(torch.float64).eps)
    name = {"v1": "v1", "v2": "v2", "v3": "v3" if ways == 1 else "v3-qkv", "paper": "v3-paper"}[mode]
    d = Draft(f"dca-grn-{name}", {"n_sources": n, "n_outputs": ways, "B": B, "T": T, "d": D, "mode": mode})
    stack = d.input("stack", n, B, T, D, grad="stack")
    bias = d.param("bias", ways, n, D, around=1.0, grad=True)
    d.keep("init/bias", torch.ones_like(bias))
    if mode == "v1":
        with torch.no_grad():
            bias.copy_(bias[..., :1].expand_as(bias))
    # What nothing depends on has a gradient of zeros here, which the stored runs leave out.
    score = d.param("to_aggregate.1.weight", ways, D, scale=0.0 if mode in ("v1", "v2") else 0.5, grad=True)
    gain = d.param("to_aggregate.0.weight", D, around=1.0, grad=True) if mode != "paper" else None
    outputs = []
    for way in range(ways):
        seen = [v if gain is None else rms(v, eps) * gain for v in stack]
        scores = [(v * score[way]).sum(-1, keepdim=True).relu() for v in seen]
        outputs.append(weighted([b + s for b, s in zip(bias[way], scores, strict=True)], stack))
    return d.backward(d.output("out", torch.stack(outputs) if ways > 1 else outputs[0]))


def elc_bert(final: bool) -> Draft:
    n, T, D = 7, 3, 6
    sizes: dict[str, Any] = {"L": n - 1} if final else {"n_sources": n}
    variant = "op-finalmix" if final else "op-mix"
    d = Draft(f"elcbert-{variant}", {**sizes, "T": T, "B": B, "d": D}, variant=variant)
    sources = [d.input(f"h.{i}", T, B, D, grad=f"h.{i}") for i in range(n)]
    logits = d.param("prev_layer_weights", n, grad=True)
    return d.backward(d.output("mixed", weighted(logits.softmax(0), sources)))


def short_conv(activation: str | None, bias: bool, T: int, k: int) -> Draft:
    C = 5
    config = {"B": B, "T": T, "C": C, "k": k, "activation": activation, "bias": bias}
    d = Draft(f"shortconv-op-{activation}-{'bias' if bias else 'plain'}-{T}", config)
    x, state = d.input("x", B, T, C), d.input("initial_state", B, C, k - 1)
    names = ["weight", *(["bias"] if bias else [])]
    weight = d.param("weight", C, k)
    parameters = [weight, *([d.param("bias", C)] if bias else [])]

    def run(before: Tensor) -> Tensor:
        whole = torch.cat((before.transpose(1, 2), x), dim=1)
        y = convolved(whole, weight)[:, k - 1 :] + (parameters[1] if bias else 0.0)
        return silu(y) if activation == "silu" else y

    empty = torch.zeros_like(state)
    y, y_from_state = d.output("y", run(empty)), d.output("y_from_state", run(state))
    d.output("y_stepwise", y_from_state)
    for name, before in (("final_state", empty), ("final_state_from_state", state)):
        d.output(name, torch.cat((before, x.transpose(1, 2)), dim=-1)[..., T:])
    cotangent = d.keep("input/cotangent", d.draw(*y.shape))
    fresh = torch.autograd.grad((y * cotangent).sum(), (x, *parameters))
    later = torch.autograd.grad((y_from_state * cotangent).sum(), (x, *parameters, state))
    d.tensors |= {f"grad/{name}": g for name, g in zip(("x", *names), fresh, strict=True)}
    found = [*(f"{name}_from_state" for name in ("x", *names)), "initial_state"]
    d.tensors |= {f"grad/{name}": g for name, g in zip(found, later, strict=True)}
    return d


def attention(name: str, window: int | None) -> Draft:
    """A layer of fla with a window, or the paper's KV shift."""
    D, H, G, K, T, theta = 10, 4, 2, 6, 9, 500.0
    sizes = {"d": D, "H": H, "kv": G, "B": B, "T": T, "rope_theta": theta, **({"window_size": window} if window else {})}
    d = Draft(name, sizes)
    x = d.input("x", B, T, D, grad="x")
    heads = {"q": H, "k": G, "v": G}
    q, k, v = (by_head(x @ d.matrix(f"{n}_proj.weight", heads[n] * K, D, grad=True).T, heads[n]) for n in "qkv")
    if window is None:
        shifts = [d.param(n, G, 2, grad=True) for n in "KV"]
        k, v = (s[:, :1] * shifted(y, 1) + s[:, 1:] * y for s, y in zip(shifts, (k, v), strict=True))
        d.output("k_shifted_before_rope", k)
        d.output("v_shifted", v)
    output = d.matrix("o_proj.weight", D, H * K, grad=True)
    q, k = rotated(q, theta, K), rotated(k, theta, K)
    if window is not None:
        d.output("y_full_attention_same_weights", attended(q, k, v, None) @ output.T)
    return d.backward(d.output("y", attended(q, k, v, window) @ output.T))


def kv_shift_linear() -> Draft:
    D, H, T = 12, 3, 4
    d = Draft("kvshift-op", {"d": D, "num_heads": H, "B": B, "T": T})
    x = d.input("x", B, T, D, grad="x")
    u = by_head(x @ d.matrix("linear.weight", D, D, grad=True).T, H)
    alpha = torch.sigmoid(x @ d.matrix("shift_proj.weight", H, D, grad=True).T).unsqueeze(-1)
    return d.backward(d.output("y", (alpha * shifted(u, 1) + (1 - alpha) * u).flatten(2)))


MADE = {
    "attnres-op": functools.partial(attnres_op, False),
    "attnres-op-onorm": functools.partial(attnres_op, True),
    "attnres-twophase-op": attnres_two_phase,
    "attnres-inkling2-op": functools.partial(inkling2, 3),
    "mhar-op": mhar_op,
    "dca-grn-v1": functools.partial(dca_grn, "v1"),
    "dca-grn-v2": functools.partial(dca_grn, "v2"),
    "dca-grn-v3": functools.partial(dca_grn, "v3"),
    "dca-grn-v3-qkv": functools.partial(dca_grn, "v3", 3),
    "dca-grn-v3-paper": functools.partial(dca_grn, "paper"),
    "elcbert-op-mix": functools.partial(elc_bert, False),
    "elcbert-op-finalmix": functools.partial(elc_bert, True),
    "shortconv-op": functools.partial(short_conv, None, True, 7, 3),
    "shortconv-op, fewer tokens than taps": functools.partial(short_conv, "silu", False, 2, 5),
    "swa-fla-layer": functools.partial(attention, "swa-fla-layer", 3),
    "kvshift-paper-op": functools.partial(attention, "kvshift-paper-op", None),
    "kvshift-op": kv_shift_linear,
}
