"""Claim 9: the recommended block is three sublayers of this library and nothing else.

Letters: B batch, T position, D width, H heads, G kv-heads, K key width.
"""

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from twoaxis.claims.claim import PAPER, Claim, Evidence, Finding
from twoaxis.claims.toy_models import decoder, tokens, weighted_sum
from twoaxis.core.measure import distance

WINDOW, LAYERS, THETA, EPS = 4, 3, 10_000.0, 1e-6
HEADS: dict[str, tuple[int, int, int]] = {"short_swa": (2, 1, 4), "attention": (4, 2, 2)}
"""H, G, K of both attentions."""

BLOCK: tuple[dict[str, Any], ...] = (
    {"kind": "short_swa", "window": WINDOW, "n_heads": 2, "n_kv_heads": 1, "head_dim": 4},
    {"kind": "attention", "n_heads": 4, "n_kv_heads": 2, "head_dim": 2},
    {"kind": "swiglu", "d_ff": 12},
)
GRADIENTS = 1e-11

Weights = dict[str, Tensor]


class Transcription:
    """Transcribes Algorithm 1 line by line on given weights.

    Attributes:
        taken: names of the weights that were used.
    """

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self.taken: set[str] = set()

    def __call__(self, ids: Tensor) -> Float[Tensor, "B T V"]:
        """Returns logits."""
        embedding = self._take("embedding.weight")
        h = embedding[ids]
        for layer in range(LAYERS):
            block = f"blocks.{layer}"
            s = h + self._attend(f"{block}.short_swa", self._norm(f"{block}.short_swa.norm", h), "short_swa", WINDOW)
            a = s + self._attend(f"{block}.attention", self._norm(f"{block}.attention.norm", s), "attention", None)
            h = a + self._mlp(f"{block}.swiglu.mixer", self._norm(f"{block}.swiglu.norm", a))
        return self._norm("norm", h) @ embedding.T

    def _take(self, name: str) -> Tensor:
        self.taken.add(name)
        return self._weights[name]

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * self._take(f"{name}.gain")

    def _attend(self, name: str, c: Tensor, kind: str, window: int | None) -> Tensor:
        H, G, K = HEADS[kind]
        B, T, _ = c.shape
        q, k, v = (c @ self._take(f"{name}.mixer.qkv.weight").T).split((H * K, G * K, G * K), dim=-1)
        q, k = (_turned(x.view(B, T, -1, K)) for x in (q, k))
        v = v.view(B, T, G, K)
        head_outputs = []
        for head in range(H):
            group = head // (H // G)
            scores = q[:, :, head] @ k[:, :, group].transpose(1, 2) / math.sqrt(K)
            age = torch.arange(T)[:, None] - torch.arange(T)
            unseen = (age < 0) | (age >= (T if window is None else window))
            weights = scores.masked_fill(unseen, -math.inf).softmax(-1)
            head_outputs.append(weights @ v[:, :, group])
        return torch.cat(head_outputs, dim=-1) @ self._take(f"{name}.mixer.output.weight").T

    def _mlp(self, name: str, c: Tensor) -> Tensor:
        gate, up = (c @ self._take(f"{name}.gate_up.weight").T).chunk(2, dim=-1)
        return (gate * torch.sigmoid(gate) * up) @ self._take(f"{name}.down.weight").T


def _turned(x: Float[Tensor, "B T N K"]) -> Float[Tensor, "B T N K"]:
    """Rotates channels i and i + K/2, as a complex number, by position times theta^(-2i/K)."""
    T, K = x.shape[1], x.shape[-1]
    speed = THETA ** (-torch.arange(0, K, 2, dtype=x.dtype) / K)
    angle = torch.arange(T, dtype=x.dtype)[:, None] * speed
    pairs = torch.complex(x[..., : K // 2], x[..., K // 2 :]) * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.cat((pairs.real, pairs.imag), dim=-1)


def names() -> list[str]:
    """The parameter names of the algorithm."""
    attention = ("norm.gain", "mixer.qkv.weight", "mixer.output.weight")
    parts = {
        "short_swa": attention,
        "attention": attention,
        "swiglu": ("norm.gain", "mixer.gate_up.weight", "mixer.down.weight"),
    }
    blocks = [f"blocks.{n}.{kind}.{part}" for n in range(LAYERS) for kind, own in parts.items() for part in own]
    return sorted(["embedding.weight", "norm.gain", *blocks])


def compute() -> Finding:
    """Compares the decoder of three-sublayer blocks with the transcription on the same state dict."""
    found = Evidence()
    model = decoder(block=BLOCK, n_layers=LAYERS)
    weights = {name: value.clone().requires_grad_() for name, value in model.state_dict().items()}
    algorithm = Transcription(weights)
    got, expected = model(tokens()), algorithm(tokens())
    found.exactly("names of the state dict", sorted(weights), names())
    found.exactly("weights that the algorithm takes", sorted(algorithm.taken), sorted(weights))
    found.close("logits", got, expected)
    weighted_sum(got).backward()
    weighted_sum(expected).backward()
    for name, parameter in model.named_parameters():
        own, other = parameter.grad, weights[name].grad
        if own is None or other is None:
            found.true(f"{name} has a gradient on both sides", False)
        else:
            found.close("gradients", own, other, GRADIENTS)
    without = decoder(block=BLOCK[1:], n_layers=LAYERS)
    found.true("ShortSWA changes the logits", distance(without(tokens()), got) > 1e-4)
    return found.finding(
        f"blocks = [['short_swa', 'attention', 'swiglu']], three layers: the state dict has the {len(weights)} tensors of the "
        "algorithm and no other.",
        "A line-by-line transcription that shares no code with the library takes each of them and gives the same logits within "
        "1e-12 and the same gradients within 1e-11.",
    )


CLAIM = Claim(
    number=9,
    title="The recommended block",
    statement="A block adds ShortSWA, then attention, then a feed-forward to the residual stream, each behind a norm of its "
    "own: three sublayers of this library and nothing else.",
    source=f"{PAPER}, section 2.5, Algorithm 1",
    tested="A decoder of such blocks against a direct transcription of the algorithm on its state dict: names, logits, "
    "gradients.",
    compute=compute,
)
