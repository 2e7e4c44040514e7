"""Every depth mixer with every sequence mixer: forward, backward, decode, or a refusal in one sentence.

Each mixer of one axis meets each of the other, and each example one of them, in two blocks of it and attention, which carries
heads from the first to the second.
"""

import re
from typing import Any

import pytest
import torch

from twoaxis.core.errors import ConfigError
from twoaxis.core.measure import perturb
from twoaxis.depth import DEPTH, DepthConfig
from twoaxis.sequence import SEQUENCE, SequenceConfig
from twoaxis.testing.decoding import decode
from twoaxis.testing.toy import ATTENTION, D_MODEL, toy_decoder, toy_tokens


def _pairs() -> list[Any]:
    """Examples of both axes in turn: as many pairs of two mixers as let each of their examples meet a mixer."""
    found = {}
    for n, depth in enumerate(DEPTH):
        for m, sequence in enumerate(SEQUENCE):
            names, others = list(depth.examples), list(sequence.examples)
            shares = (-(-len(names) // len(list(SEQUENCE))), -(-len(others) // len(list(DEPTH))))
            for turn in range(max(shares)):
                d, s = names[(m * shares[0] + turn) % len(names)], others[(n * shares[1] + turn) % len(others)]
                found[f"{depth.kind}-{d}-{sequence.kind}-{s}"] = depth.example(d), sequence.example(s)
    return [pytest.param(*pair, id=name) for name, pair in found.items()]


PAIRS = _pairs()


CARRIES_HEADS = ("value_residual", "lime", "depth_value_mixing", "mixture_of_depths_attention")
"""Mixers that carry kv-heads from layer to layer, so that all layers of a kind need the same."""


def _unrotated_keys(depth: DepthConfig, sequence: SequenceConfig) -> bool:
    """Whether a depth mixer takes keys before their rotation from a mixer that gives them their norm after it."""
    shape = sequence.head_shape(D_MODEL)
    reads = depth.kind == "mixture_of_depths_attention" and getattr(depth, "weights", "") == "attention"
    return reads and shape is not None and shape.key_norm == "after_rope"


def _kv(config: SequenceConfig) -> tuple[int, int] | None:
    heads = config.head_shape(D_MODEL)
    return None if heads is None else (heads.n_kv_heads, heads.head_dim)


@pytest.mark.parametrize(("depth", "sequence"), PAIRS)
def test_pair(depth: DepthConfig, sequence: SequenceConfig) -> None:
    blocks = ((sequence, ATTENTION),)
    if depth.kind in CARRIES_HEADS and sequence.kind == ATTENTION.kind and _kv(sequence) != _kv(ATTENTION):
        with pytest.raises(ConfigError, match=r"^[^\n]*kv-heads of 'attention'[^\n]*in every layer[^\n]*$"):
            toy_decoder(depth, n_layers=2, blocks=blocks)
        return
    if _unrotated_keys(depth, sequence):
        with pytest.raises(ConfigError, match=r"^key norm of [^\n]*='after_rope': must be before_rope or none; [^\n]*$"):
            toy_decoder(depth, n_layers=2, blocks=blocks)
        return
    try:
        model = perturb(toy_decoder(depth, n_layers=2, blocks=blocks, perturbed=False))
    except ConfigError as error:
        assert not sequence.accepts_qkv
        assert re.fullmatch(rf"[^\n]*reads separate q, k and v before '{sequence.kind}'[^\n]*", str(error))
        return
    tokens = toy_tokens(tokens=6)
    full = model(tokens)
    full.square().sum().backward()
    for name, parameter in model.named_parameters():
        # What stands before a mixer of token ids alone may train nothing.
        unread = parameter.grad is None and not sequence.reads_context
        assert unread or (parameter.grad is not None and parameter.grad.isfinite().all()), name
    with torch.no_grad():
        assert torch.allclose(decode(model, tokens, (3, 1, 2)), full, rtol=0, atol=1e-10)
