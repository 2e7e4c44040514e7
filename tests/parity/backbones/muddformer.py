"""The decoders of the MUDDFormer code, from stored parameters: Llama-like (PyTorch and JAX) and Pythia-like."""

import math
from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor

from ..golden import Golden

Inputs = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values before their norms; in the first block thrice the same."""

Cache = dict[int, tuple[Tensor, Tensor]]
"""Rotated keys, and values, of the tokens so far, by block."""

PROJECTIONS = {"q": "query", "k": "key", "v": "value"}


class Body(ABC):
    """The branches around the depth mixer; a subclass names the stored parameters."""

    def __init__(self, golden: Golden) -> None:
        self.golden = golden
        self.eps: float = 1e-6
        self.cos, self.sin = self.turn()

    def turn(self) -> tuple[Tensor, Tensor]:
        """The table of the authors, which is rounded to half precision."""
        cos, sin = self.golden.take("buffer/freqs_cis").unbind(-1)
        return cos, sin

    def attention(self, block: int, inputs: Inputs, cache: Cache | None = None) -> Tensor:
        """Causal attention of one block, without biases of its own beside those of `linear`."""
        normed = self.input_norms(block, inputs)
        q, k, v = (self.heads(block, name, x) for name, x in zip("qkv", normed, strict=True))
        start = cache[block][0].shape[2] if cache and block in cache else 0
        q, k = (self.rotated(self.head_norm(block, name, x), start) for name, x in (("q", q), ("k", k)))
        if cache is not None:
            if start:
                k, v = (torch.cat((old, new), dim=2) for old, new in zip(cache[block], (k, v), strict=True))
            cache[block] = (k, v)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        future = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(start + 1)
        y = scores.masked_fill(future, -math.inf).softmax(-1) @ v
        return self.output(block, y.transpose(1, 2).flatten(2))

    def rotated(self, x: Tensor, start: int) -> Tensor:
        """Rotates the first channels of each head, as many as the table has."""
        turned, rest = x.split((2 * self.cos.shape[-1], x.shape[-1] - 2 * self.cos.shape[-1]), dim=-1)
        cos, sin = (table[start : start + x.shape[2]].to(x.dtype) for table in (self.cos, self.sin))
        a, b = turned.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, a * sin + b * cos, rest), dim=-1)

    @abstractmethod
    def input_norms(self, block: int, inputs: Inputs) -> Inputs:
        """The three inputs behind their norms."""

    @abstractmethod
    def heads(self, block: int, name: str, x: Tensor) -> Tensor:
        """Projects to the heads of `q`, `k` or `v`."""

    @abstractmethod
    def head_norm(self, block: int, name: str, x: Tensor) -> Tensor:
        """Normalises the heads of `q` or `k`, where they have a norm."""

    @abstractmethod
    def output(self, block: int, y: Tensor) -> Tensor:
        """Projects the heads back."""

    @abstractmethod
    def feed_forward(self, block: int, x: Tensor) -> Tensor:
        """The feed-forward, with its norm."""

    @abstractmethod
    def logits(self, x: Tensor) -> Tensor:
        """The last norm and the head."""

    @abstractmethod
    def embedding(self) -> Tensor:
        """The table of embeddings, which gets a gradient."""


class Torch(Body):
    """`muddformer`: RMSNorm, SwiGLU."""

    def __init__(self, golden: Golden) -> None:
        super().__init__(golden)
        self.eps = golden.about["config"]["norm_eps"]
        self.n_heads = golden.about["config"]["n_head"]

    def input_norms(self, block: int, inputs: Inputs) -> Inputs:
        names = ["attention_norm"] * 3 if block == 0 else [f"attention_norms.{way}" for way in range(3)]
        q, k, v = (self.norm(f"layers.{block}.{name}", x) for name, x in zip(names, inputs, strict=True))
        return q, k, v

    def heads(self, block: int, name: str, x: Tensor) -> Tensor:
        return self.linear(f"layers.{block}.attention.w{name}", x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)

    def head_norm(self, block: int, name: str, x: Tensor) -> Tensor:
        if not self.golden.about["config"]["use_qk_norm"]:
            return x
        return rms_norm(x, self.param(f"layers.{block}.attention.{name}_norm.weight"), self.eps)

    def output(self, block: int, y: Tensor) -> Tensor:
        return self.linear(f"layers.{block}.attention.wo", y)

    def feed_forward(self, block: int, x: Tensor) -> Tensor:
        u, part = self.norm(f"layers.{block}.ffn_norm", x), f"layers.{block}.feed_forward"
        return self.linear(f"{part}.w2", F.silu(self.linear(f"{part}.w1", u)) * self.linear(f"{part}.w3", u))

    def logits(self, x: Tensor) -> Tensor:
        return self.linear("output", self.norm("norm", x))

    def embedding(self) -> Tensor:
        return self.param("tok_embeddings.weight").requires_grad_()

    def norm(self, name: str, x: Tensor) -> Tensor:
        return rms_norm(x, self.param(f"{name}.weight"), self.eps)

    def linear(self, name: str, x: Tensor) -> Tensor:
        bias = f"param/{name}.bias"
        return F.linear(x, self.param(f"{name}.weight"), self.golden.take(bias) if bias in self.golden else None)

    def param(self, name: str) -> Tensor:
        return self.golden.take(f"param/{name}")


class Pythia(Torch):
    """`muddpythia`: LayerNorm and linear maps with biases, GELU; its feed-forward reads the residual way."""

    def feed_forward(self, block: int, x: Tensor) -> Tensor:
        u, part = self.norm(f"layers.{block}.ffn_norm", x), f"layers.{block}.feed_forward"
        return self.linear(f"{part}.w2", F.gelu(self.linear(f"{part}.w1", u)))

    def norm(self, name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.param(f"{name}.weight"), self.param(f"{name}.bias"), self.eps)


class Jax(Body):
    """The training code: RMSNorm, SwiGLU, kernels that map from the left, three norms in the first block too."""

    def turn(self) -> tuple[Tensor, Tensor]:
        config, dtype = self.golden.about["config"], self.golden.tensors["input/cotangent"].dtype
        self.eps = config["normalization_layer_epsilon"]
        assert not config["qk_norm"], f"{self.golden.name}: norms of heads are not placed here"
        pairs = torch.arange(0, config["head_dim"], 2, dtype=dtype) / config["head_dim"]
        tokens = torch.arange(self.golden.tensors["input/input_ids"].shape[1], dtype=dtype)
        angles = tokens[:, None] / config["rope_max_timescale"] ** pairs
        return angles.cos(), angles.sin()

    def input_norms(self, block: int, inputs: Inputs) -> Inputs:
        q, k, v = (
            self.norm(f"layers_{block}/pre_self_attention_layer_norm_{name}", x) for name, x in zip("qkv", inputs, strict=True)
        )
        return q, k, v

    def heads(self, block: int, name: str, x: Tensor) -> Tensor:
        kernel = self.param(f"layers_{block}/self_attention/{PROJECTIONS[name]}/kernel")
        return (x @ kernel.flatten(1)).unflatten(-1, kernel.shape[1:]).transpose(1, 2)

    def head_norm(self, block: int, name: str, x: Tensor) -> Tensor:
        return x

    def output(self, block: int, y: Tensor) -> Tensor:
        return y @ self.param(f"layers_{block}/self_attention/out/kernel").flatten(0, 1)

    def feed_forward(self, block: int, x: Tensor) -> Tensor:
        u = self.norm(f"layers_{block}/post_self_attention_layer_norm", x)
        gate, linear, out = (self.param(f"layers_{block}/mlp/{name}/kernel") for name in ("wi_0", "wi_1", "wo"))
        return (F.silu(u @ gate) * (u @ linear)) @ out

    def logits(self, x: Tensor) -> Tensor:
        return self.norm("decoder_norm", x) @ self.param("logits_dense/kernel")

    def embedding(self) -> Tensor:
        return self.golden.take("param/token_embedder/embedding").requires_grad_()

    def norm(self, name: str, x: Tensor) -> Tensor:
        return rms_norm(x, self.param(f"{name}/scale"), self.eps)

    def param(self, name: str) -> Tensor:
        return self.golden.take(f"param/decoder/{name}")


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """RMSNorm in the dtype of its input."""
    return F.rms_norm(x, gain.shape, gain, eps)
