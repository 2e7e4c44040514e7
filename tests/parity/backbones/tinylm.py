"""The tiny decoder of the wrapper fixtures: no positions, norms without gain, biases nowhere, an untied head."""

from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twoaxis.core.parameters import initialise
from twoaxis.core.position import HeadShape, LayerStack, SublayerInfo
from twoaxis.depth import DepthConfig, DepthMixer

from ..golden import Golden, gradient

NORM_EPS = 1e-6


class TinyLM(nn.Module):
    """Our depth mixer around the branches of a fixture; `mixers.S.*` and `ends.*` are its parameters."""

    def __init__(self, golden: Golden, depth: DepthConfig) -> None:
        super().__init__()
        self.golden, config = golden, golden.about["config"]
        self.n_heads = H = config["heads"] if "heads" in config else config["H"]
        attention = SublayerInfo("attention", heads=HeadShape(H, H, config["d"] // H))
        slots = (attention, SublayerInfo("feed_forward")) * config["blocks"]
        self.stack = stack = depth.prepare(LayerStack(config["d"], NORM_EPS, (2,) * config["blocks"], slots))
        mixers, ends = depth.build(stack)
        self.mixers, self.ends = nn.ModuleList(mixers), ends
        initialise(self.mixers, 0)
        initialise(self.ends, 0)
        self.double()
        self.body = {name[11:]: golden.take(name) for name in golden.tensors if name.startswith("param/body.")}

    def run(self) -> dict[str, Any]:
        """Runs forward and backward; returns what every wrapper fixture stores, and the states as `states`."""
        embed = self.body["embed"].requires_grad_()
        embeddings = F.embedding(self.golden.take("input/input_ids"), embed)
        embeddings.retain_grad()
        ends: Any = self.ends
        state = ends.enter(embeddings)[0]
        states = [state]
        for index, mixer in enumerate(cast(Iterable[DepthMixer], self.mixers)):
            views: Any
            views, carry, _ = mixer.read(state)
            state = mixer.write(state, self.branch(index, views), self.context(index, views), carry)
            states.append(state)
        collapsed = ends.leave(state)[0]
        logits = self.last(collapsed) @ self.body["head"].T
        logits.backward(self.golden.take("input/cotangent"))
        return {
            "states": states,
            "output/collapsed": collapsed,
            "output/logits": logits,
            "grad/body.embed": gradient(embed),
            "grad/input_embeddings": gradient(embeddings),
        }

    def context(self, index: int, x: Any) -> Tensor:
        """What the write sees of the input of a sublayer."""
        return _norm(x)

    def input(self, index: int, x: Any) -> Tensor:
        """What a branch computes with, given the input of a sublayer."""
        return self.context(index, x)

    def heads(self, block: int, name: str, x: Tensor) -> Tensor:
        """What attends, given projected queries, keys or values [B T H K]."""
        return x

    def last(self, x: Tensor) -> Tensor:
        """What the head sees of the hidden states."""
        return _norm(x)

    def branch(self, index: int, x: Any) -> Tensor:
        """Attention at even sublayers, the feed-forward at odd ones; each begins with its own norm."""
        u, block = self.input(index, x), index // 2
        if index % 2:
            return F.gelu(u @ self.body[f"ffn{block}.w1"].T) @ self.body[f"ffn{block}.w2"].T
        q, k, v = (
            self.heads(block, name, (u @ self.body[f"attn{block}.w{name}"].T).unflatten(-1, (self.n_heads, -1))).transpose(1, 2)
            for name in "qkv"
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.transpose(1, 2).flatten(2) @ self.body[f"attn{block}.wo"].T


def streams(states: list[Any]) -> Mapping[str, Tensor]:
    """The stored streams of every state that is a tuple of streams."""
    names = ["init", *(str(index) for index in range(len(states) - 1))]
    return {f"output/streams_{name}": torch.stack(list(state), dim=-2) for name, state in zip(names, states, strict=True)}


def _norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + NORM_EPS)
