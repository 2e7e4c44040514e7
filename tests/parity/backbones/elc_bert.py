"""The encoder of ELC-BERT and of GPT-BERT: disentangled attention over relative positions, time-major.

Letters: T position, B batch, D width, H heads, K head width.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..golden import Golden


class Encoder:
    """The branches of a stored encoder; `gated` is the form of GPT-BERT, whose values carry a gate."""

    def __init__(self, golden: Golden, mask: Tensor, attention: str, mlp: str, gated: bool) -> None:
        self.golden, self.mask, self.attention, self.mlp, self.gated = golden, mask, attention, mlp, gated
        self.eps: float = golden.about["config"]["layer_norm_eps"]
        self.n_heads, tokens = golden.about["config"]["num_attention_heads"], len(golden.tensors["input/ids"])
        self.word_embedding = golden.take("param/embedding.word_embedding.weight").requires_grad_()
        self.places = golden.take("buffer/position_indices")[:tokens, :tokens]
        table = golden.take("param/embedding.relative_embedding")
        affine = [golden.take(f"param/embedding.relative_layer_norm.{name}") for name in ("weight", "bias")]
        self.relative = F.layer_norm(table, table.shape[-1:], *affine, eps=self.eps)

    def embeddings(self) -> Tensor:
        """The normalised rows of the embedding."""
        return norm(self.rows(), self.eps)

    def rows(self) -> Tensor:
        """The rows of the embedding as they are, for a depth mixer that normalises them itself."""
        return F.embedding(self.golden.take("input/ids"), self.word_embedding)

    def branch(self, index: int, x: Tensor) -> Tensor:
        """Attention at even sublayers, the feed-forward at odd ones."""
        return self._feed_forward(index // 2, x) if index % 2 else self._attend(index // 2, x)

    def _feed_forward(self, layer: int, x: Tensor) -> Tensor:
        value, gate = (norm(x, self.eps) @ self._take(self.mlp, layer, "1.weight").T).chunk(2, dim=-1)
        return norm(value * F.gelu(gate, approximate="tanh"), self.eps) @ self._take(self.mlp, layer, "4.weight").T

    def _attend(self, layer: int, x: Tensor) -> Tensor:
        def linear(name: str, y: Tensor) -> Tensor:
            return F.linear(y, *(self._take(self.attention, layer, f"{name}.{part}") for part in ("weight", "bias")))

        u = norm(x, self.eps)
        scale = 1 / math.sqrt(3 * x.shape[-1] // self.n_heads)
        q, k = (self._heads(y) for y in linear("in_proj_qk", u).chunk(2, dim=-1))
        q_place, k_place = (self._heads(y)[self.places] for y in linear("in_proj_qk", self.relative).chunk(2, dim=-1))
        values, *gate = linear("in_proj_vg", u).chunk(2, dim=-1) if self.gated else (linear("in_proj_v", u),)
        scores = torch.einsum("qbhk,tbhk->bhqt", q, k)
        scores = scores + torch.einsum("qbhk,qthk->bhqt", q, k_place) + torch.einsum("tbhk,qthk->bhqt", k, q_place)
        probabilities = torch.softmax((scores * scale).masked_fill(self.mask, -math.inf), dim=-1)
        y = torch.einsum("bhqt,tbhk->qbhk", probabilities, self._heads(values)).flatten(2)
        if self.gated:
            return linear("out_proj", norm(y * F.gelu(gate[0]), self.eps))
        affine = [self._take(self.attention, layer, f"post_layer_norm.{part}") for part in ("weight", "bias")]
        return F.layer_norm(linear("out_proj", y), x.shape[-1:], *affine, eps=self.eps)

    def _heads(self, y: Tensor) -> Tensor:
        return y.unflatten(-1, (self.n_heads, -1))

    def _take(self, module: str, layer: int, name: str) -> Tensor:
        return self.golden.take(f"param/{module.format(layer)}.{name}")


def norm(x: Tensor, eps: float) -> Tensor:
    """LayerNorm without gain or bias."""
    return F.layer_norm(x, x.shape[-1:], eps=eps)
