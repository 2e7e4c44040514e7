"""Writes the fixtures of residual scalars from their equations, in plain torch; run it as a script.

No public code has the scalars without the rest of nanochat, so these fixtures certify the equations and nobody's code. This
file imports nothing of the library. Parameters other than the scalars are named as in Llama checkpoints.

Equations: karpathy/nanochat, gpt.py at 92d63d4, for block i (N0 the RMS norm without a gain, eps the epsilon of the dtype):
x_0 = N0(wte[id]), x = x_0 at first; x <- resid_lambdas[i] x + x0_lambdas[i] x_0; x <- x + attn(N x); x <- x + mlp(N x).
"""

import hashlib
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

FIXTURES = Path(__file__).with_name("fixtures")
V, D, LAYERS, HEADS, HIDDEN, BATCH, TOKENS, EPS, BASE = 11, 8, 3, 2, 12, 2, 6, 1e-6, 10000.0
FORMS = {
    "nanochat": "x_0 = N0(e); the stream starts as x_0; x <- resid_lambdas[i] x + x0_lambdas[i] x_0 once per block i",
    "normalised": "x_0 = N0(e); the stream starts as e; x <- resid_lambdas[s] x + x0_lambdas[s] x_0 before each sublayer s",
    "raw": "x_0 = e; the stream starts as e; x <- resid_lambdas[s] x + x0_lambdas[s] x_0 before each sublayer s",
}


def norm(x: Tensor, eps: float) -> Tensor:
    """RMS norm without a gain."""
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def rotate(x: Tensor) -> Tensor:
    """Rotary embedding of [B H T head_dim], on the two halves."""
    half = x.shape[-1] // 2
    angle = torch.arange(TOKENS, dtype=x.dtype)[:, None] * BASE ** (-torch.arange(half, dtype=x.dtype) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


def attention(x: Tensor, p: dict[str, Tensor], layer: str) -> Tensor:
    """Causal softmax attention."""
    q, k, v = (
        (x @ p[f"{layer}.self_attn.{n}_proj.weight"].T).view(BATCH, TOKENS, HEADS, -1).transpose(1, 2) for n in ("q", "k", "v")
    )
    scores = rotate(q) @ rotate(k).transpose(-1, -2) / (D // HEADS) ** 0.5
    scores = scores.masked_fill(torch.ones(TOKENS, TOKENS).triu(1).bool(), float("-inf"))
    mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(BATCH, TOKENS, D)
    return mixed @ p[f"{layer}.self_attn.o_proj.weight"].T


def mlp(x: Tensor, p: dict[str, Tensor], layer: str) -> Tensor:
    """SwiGLU."""
    gate, up = (x @ p[f"{layer}.mlp.{n}_proj.weight"].T for n in ("gate", "up"))
    return (gate * gate.sigmoid() * up) @ p[f"{layer}.mlp.down_proj.weight"].T


def decoder(form: str, embeddings: Tensor, p: dict[str, Tensor]) -> tuple[list[Tensor], Tensor]:
    """The stream before each sublayer and after the last one, and the logits."""
    x_0 = embeddings if form == "raw" else norm(embeddings, torch.finfo(embeddings.dtype).eps)
    x = x_0 if form == "nanochat" else embeddings
    streams = [x]
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        for place, (sublayer, gain) in enumerate(((attention, "input"), (mlp, "post_attention"))):
            s = i if form == "nanochat" else 2 * i + place
            if form != "nanochat" or place == 0:
                x = p["resid_lambdas"][s] * x + p["x0_lambdas"][s] * x_0
            x = x + sublayer(norm(x, EPS) * p[f"{layer}.{gain}_layernorm.weight"], p, layer)
            streams.append(x)
    return streams, norm(x, EPS) * p["model.norm.weight"] @ p["lm_head.weight"].T


def parameters(form: str) -> dict[str, Tensor]:
    """Every parameter, away from its initial value."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (V, D),
        "model.norm.weight": (D,),
        "lm_head.weight": (V, D),
    }
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.self_attn.{n}_proj.weight": (D, D) for n in "qkvo"}
        shapes |= {f"{layer}.mlp.{n}_proj.weight": (HIDDEN, D) for n in ("gate", "up")}
        shapes |= {f"{layer}.mlp.down_proj.weight": (D, HIDDEN)}
        shapes |= {f"{layer}.{n}_layernorm.weight": (D,) for n in ("input", "post_attention")}
    made = {name: torch.randn(shape, dtype=torch.float64) * 0.5 for name, shape in shapes.items()}
    made |= {name: 1 + 0.3 * value for name, value in made.items() if len(value.shape) == 1}
    n = LAYERS if form == "nanochat" else 2 * LAYERS
    made["resid_lambdas"] = 1 + 0.3 * torch.randn(n, dtype=torch.float64)
    made["x0_lambdas"] = 0.1 + 0.3 * torch.randn(n, dtype=torch.float64)
    return {name: value.requires_grad_() for name, value in made.items()}


def make(form: str, seed: int) -> None:
    """Writes one fixture."""
    torch.manual_seed(seed)
    p = parameters(form)
    ids, cotangent = torch.randint(0, V, (BATCH, TOKENS)), torch.randn(BATCH, TOKENS, V, dtype=torch.float64)
    embeddings = p["model.embed_tokens.weight"][ids]
    embeddings.retain_grad()
    streams, logits = decoder(form, embeddings, p)
    (logits * cotangent).sum().backward()
    tensors = {"input/input_ids": ids, "input/cotangent_logits": cotangent, "output/logits": logits}
    tensors |= {f"output/stream_{s}": stream for s, stream in enumerate(streams)}
    tensors |= {"grad/input_embeds": embeddings.grad}
    tensors |= {f"param/{name}": value for name, value in p.items()} | {f"grad/{name}": value.grad for name, value in p.items()}
    tensors = {name: value.detach().contiguous() for name, value in tensors.items()}
    name = f"residual-scalars-{form}"
    about = {
        "name": name,
        "method": "residual scalars (no paper)",
        "reference": "made from the published equations by tests/parity/make_residual_scalars.py, not by the authors' code: "
        "karpathy/nanochat @ 92d63d4 nanochat/gpt.py, resid_lambdas and x0_lambdas",
        "description": f"{FORMS[form]}. N0 is the RMS norm without a gain, eps the epsilon of the dtype. Body: pre-norm blocks "
        "of causal attention (rotary on two halves) and SwiGLU, RMSNorm with a gain, untied head. output/stream_s is the "
        "stream before sublayer s, and after the last one. grad/* = d(sum(logits * cotangent_logits)).",
        "config": {"vocab_size": V, "d_model": D, "n_layers": LAYERS, "n_heads": HEADS, "d_ff": HIDDEN, "norm_eps": EPS},
        "seed": seed,
        "versions": {"torch": torch.__version__},
        "tolerance": "float64: atol 1e-11, rtol 1e-11",
        "tensors": {
            key: {
                "shape": list(value.shape),
                "dtype": str(value.dtype).removeprefix("torch."),
                "sha256_16": hashlib.sha256(value.numpy().tobytes()).hexdigest()[:16],
            }
            for key, value in sorted(tensors.items())
        },
    }
    save_file(tensors, FIXTURES / f"{name}.safetensors")
    (FIXTURES / f"{name}.json").write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    for number, form in enumerate(FORMS):
        make(form, 1600 + number)
