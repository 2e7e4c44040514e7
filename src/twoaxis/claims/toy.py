"""The small float64 decoders that claims are tested on."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from twoaxis.core.probe import noise, perturb
from twoaxis.depth import DepthConfig, ResidualConfig
from twoaxis.model import Decoder, DecoderConfig

VOCAB, D_MODEL, N_LAYERS, TOKENS = 11, 8, 3, 9

BLOCK: tuple[dict[str, Any], ...] = ({"kind": "attention", "n_heads": 2, "head_dim": 4}, {"kind": "swiglu", "d_ff": 16})


def decoder(
    depth: DepthConfig | None = None, *, block: Sequence[dict[str, Any]] = BLOCK, moved: bool = True, **changes: Any
) -> Decoder:
    """A decoder of three blocks, by default moved away from its initial values so that no zero hides a difference."""
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "d_model": D_MODEL, "n_layers": N_LAYERS, "blocks": (tuple(block),)}
    model = Decoder.build(DecoderConfig.from_data({**sizes, "depth": depth or ResidualConfig(), **changes})).double()
    return perturb(model) if moved else model


def tokens(batch: int = 2, length: int = TOKENS) -> Int[Tensor, "B T"]:
    """The same token ids every time."""
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(0))


def weighted_sum(logits: Tensor) -> Tensor:
    """A loss that every logit enters with a weight of its own."""
    return (logits * noise(tuple(logits.shape), "claims/loss")).sum()
