"""The small decoders that claims are computed on, and the operations of running ones.

Letters: T tokens, d width of all heads, w window along positions, K window along depth, L blocks.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from twoaxis.core.measure import Operation, Operations, noise, perturb, product_flops
from twoaxis.depth import DepthConfig, ResidualConfig
from twoaxis.model import Decoder, DecoderConfig
from twoaxis.ops.kernels import without_kernels

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


HEADS, D_FF = 2, 8


class Added(NamedTuple):
    """What a mixer adds to one forward pass.

    Attributes:
        mixing: of scores and values.
        projections: of its matrices.
    """

    mixing: int
    projections: int


def short_swa_adds(T: int, w: int, d: int) -> Added:
    """What ShortSWA adds in each block; as the windowed engine runs, pairs that a chunk computes and masks are counted too."""
    swa = {"kind": "short_swa", "n_heads": HEADS, "n_kv_heads": HEADS, "window": w}
    total, pairs = _products(_decoder(d, 1, [swa, {"kind": "swiglu", "d_ff": D_FF}]), T)
    plain, plain_pairs = _products(_decoder(d, 1), T)
    return Added(pairs - plain_pairs, total - pairs - (plain - plain_pairs))


def depth_attention_adds(T: int, L: int, d: int, K: int | None = None) -> Added:
    """What reads before every block add; scores and values are products and sums of single tensors, not of matrices."""
    model = _decoder(d, L, depth=(("kind", "depth_attention"), ("n_heads", HEADS), ("window", K)))
    mixing = 0

    def note(operation: Operation) -> None:
        # Multiply-adds on tensors of heads, [B T H K], of which depth attention is made: two for each product.
        nonlocal mixing
        if operation.name in ("mul", "addcmul"):
            mixing += 2 * sum(x.numel() for x in operation.made if x.shape[2:] == (HEADS, d // HEADS))

    with Operations(note), without_kernels():
        total, _ = _products(model, T)
    return Added(mixing, total - _products(_decoder(d, L), T)[0])


def _products(model: Decoder, T: int) -> tuple[int, int]:
    """All matrix products of a forward pass, and those between activations."""
    ids = torch.zeros(1, T, dtype=torch.long)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        return product_flops(lambda: model(ids))


def _decoder(d: int, L: int, block: Any = None, depth: tuple[tuple[str, Any], ...] = (("kind", "residual"),)) -> Decoder:
    return _built(d, L, tuple(tuple(part.items()) for part in block or [{"kind": "swiglu", "d_ff": D_FF}]), depth)


@lru_cache(maxsize=64)
def _built(d: int, L: int, block: Any, depth: Any) -> Decoder:
    """A decoder whose blocks have no attention, so that nothing but the mixer works on heads."""
    sizes = {"vocab_size": VOCAB, "d_model": d, "n_layers": L, "blocks": [[dict(part) for part in block]]}
    return Decoder.build(DecoderConfig.from_data({**sizes, "depth": dict(depth)}))
