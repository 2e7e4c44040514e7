"""Packages that offer a depth mixer, each next to the plain form of the same model.

A package that is not installed is reported and left out, never imitated.
"""

import dataclasses
import functools
import importlib
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import models
from benchmarks.peers import PeerShape, x_transformers_model
from twoaxis.core.layout import TokenLayout


@dataclass(frozen=True)
class DepthPeer:
    """One training step with a package; the first peer of a package is its plain model."""

    package: str
    name: str
    step: Callable[[], Tensor]


def depth_peers(shape: PeerShape, wanted: set[Any]) -> Iterator[DepthPeer]:
    """Yields the wanted peers, each package beginning with its plain model."""
    for family in (_hyper_connections, _deep_cross_attention, _attn_res, _x_transformers):
        try:
            builders = family(shape)
        except ImportError as error:
            print(f"left out: {error}", file=sys.stderr)
            continue
        plain, *others = builders.items()
        chosen = [(name, build) for name, build in others if name in wanted]
        for name, build in (plain, *chosen) if chosen else ():
            yield DepthPeer(family.__name__, name, _step(build(), shape.tokens()))


def _step(model: nn.Module, tokens: Tensor) -> Callable[[], Tensor]:
    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        return loss.detach()

    return step


Builders = dict[str, Callable[[], nn.Module]]


class _Wrapped(nn.Module):
    """The sublayers of our plain decoder, each behind a connection of the package."""

    def __init__(self, shape: PeerShape, functions: Callable[..., Any], n_streams: int) -> None:
        super().__init__()
        self.decoder = models.decoder(shape)
        connect, self.expand, self.reduce = functions(n_streams, dim=shape.d_model, disable=n_streams == 1)
        sublayers = [sublayer for block in self.decoder.blocks for sublayer in block.sublayers]  # type: ignore[union-attr]
        # The package draws the stream of each layer from Python's random numbers unless it is told the layer.
        random.seed(0)
        self.connections = nn.ModuleList(connect(branch=_Branch(s), layer_index=i) for i, s in enumerate(sublayers))

    def forward(self, tokens: Tensor) -> Tensor:
        streams = self.expand(self.decoder.embed(tokens))
        for connection in self.connections:
            streams = connection(streams)
        return self.decoder.logits(self.decoder.norm(self.reduce(streams)))


class _Branch(nn.Module):
    def __init__(self, sublayer: Any) -> None:
        super().__init__()
        self.norm, self.mixer = sublayer.norm, sublayer.mixer

    def forward(self, x: Tensor) -> Tensor:
        return self.mixer(self.norm(x), TokenLayout.contiguous(x.shape[1]))[0]


def _hyper_connections(shape: PeerShape) -> Builders:
    from hyper_connections import (
        get_init_and_expand_reduce_stream_functions,
        mc_get_init_and_expand_reduce_stream_functions,
    )

    return {
        "hyper-connections plain": lambda: _Wrapped(shape, get_init_and_expand_reduce_stream_functions, 1),
        "hyper-connections 4": lambda: _Wrapped(shape, get_init_and_expand_reduce_stream_functions, 4),
        "hyper-connections mHC 4": lambda: _Wrapped(shape, mc_get_init_and_expand_reduce_stream_functions, 4),
    }


def _deep_cross_attention(shape: PeerShape) -> Builders:
    from deep_cross_attention.dca_gpt import DCAGPT
    from deep_cross_attention.gpt import GPT

    sizes = {"num_tokens": shape.vocab_size, "dim": shape.d_model, "depth": shape.n_layers, "heads": shape.n_heads}
    return {
        "deep-cross-attention plain": lambda: GPT(**sizes),
        "deep-cross-attention, all layers": lambda: DCAGPT(**sizes, past_layers_k=shape.n_layers),
    }


def _attn_res(shape: PeerShape) -> Builders:
    from attn_res.main import AttnResMode, AttnResTransformer, TransformerConfig

    config = TransformerConfig(
        d_model=shape.d_model,
        n_layers=2 * shape.n_layers,
        n_heads=shape.n_heads,
        n_kv_heads=shape.n_heads,
        vocab_size=shape.vocab_size,
        max_seq_len=shape.max_seq_len,
        n_blocks=shape.n_layers // 2,
    )

    def build(mode: AttnResMode) -> Callable[[], nn.Module]:
        return lambda: _FirstResult(AttnResTransformer(dataclasses.replace(config, attn_res_mode=mode)))

    return {
        "attn-res plain": build(AttnResMode.NONE),
        "attn-res full": build(AttnResMode.FULL),
        "attn-res block": build(AttnResMode.BLOCK),
    }


def _x_transformers(shape: PeerShape) -> Builders:
    # Reported here when it is missing, not where a model is built.
    importlib.import_module("x_transformers")
    build = functools.partial(functools.partial, x_transformers_model, shape)
    return {
        "x-transformers plain": build(),
        "x-transformers value residual": build(add_value_residual=True),
        "x-transformers LIMe": build(integrate_layers=True),
    }


class _FirstResult(nn.Module):
    """The logits of a model that returns more than them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        result = self.model(tokens)
        return result[0] if isinstance(result, tuple) else result
