"""Our decoder at the shape of the peers, as training steps."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers import PeerShape
from twoaxis import Decoder, DecoderConfig


def config(shape: PeerShape, depth: Any = "residual", mixers: Sequence[Any] = ()) -> DecoderConfig:
    """The decoder that the peers also build, with a depth mixer, and these sublayers in place of attention."""
    attention = {"kind": "attention", "n_heads": shape.n_heads}
    blocks = [[*(mixers or [attention]), {"kind": "swiglu", "d_ff": shape.d_ff}]]
    sizes = {name: getattr(shape, name) for name in ("vocab_size", "d_model", "n_layers", "max_seq_len")}
    return DecoderConfig.from_data({**sizes, "depth": depth, "blocks": blocks})


def decoder(shape: PeerShape, depth: Any = "residual", mixers: Sequence[Any] = ()) -> Decoder:
    """The decoder of this configuration, with its weights."""
    return Decoder.build(config(shape, depth, mixers))


def loss_step(model: Decoder, tokens: Tensor, loss: Callable[..., Any] | None = None) -> Callable[[], Tensor]:
    """A step that runs forward and backward on tokens [B T+1]; `loss` is `model.loss`, or a compiled form of it."""
    evaluate = loss or model.loss
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        total, count = evaluate(inputs, targets)
        (total / count).backward()
        return total.detach()

    return step


def training_step(shape: PeerShape, depth: Any = "residual") -> Callable[[], Tensor]:
    """One training step, for `measure.peak_memory`, which builds it in a process of its own."""
    return loss_step(decoder(shape, depth), shape.tokens())


def compiled_step(model: Decoder, tokens: Tensor) -> Callable[[], Tensor]:
    """A training step whose loss is compiled whole, for one fixed shape."""
    return loss_step(model, tokens, torch.compile(model.loss, dynamic=False))
