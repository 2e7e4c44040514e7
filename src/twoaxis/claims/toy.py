"""Small float64 decoders on which claims are tested."""

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
    """Builds a decoder of three blocks, by default perturbed so that no zero hides a difference."""
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "d_model": D_MODEL, "n_layers": N_LAYERS, "blocks": (tuple(block),)}
    model = Decoder.build(DecoderConfig.from_data({**sizes, "depth": depth or ResidualConfig(), **changes})).double()
    return perturb(model) if moved else model


def tokens(batch: int = 2, length: int = TOKENS) -> Int[Tensor, "B T"]:
    """Fixed random token ids."""
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(0))


def weighted_sum(logits: Tensor) -> Tensor:
    """A loss with a different weight for every logit."""
    return (logits * noise(tuple(logits.shape), "claims/loss")).sum()
