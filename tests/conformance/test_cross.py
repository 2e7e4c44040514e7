"""Every depth mixer with every sequence mixer: forward, backward, decode."""

import pytest
import torch

from twoaxis.depth import DEPTH, DepthConfig
from twoaxis.sequence import SEQUENCE, SequenceConfig
from twoaxis.testing.decoding import decode
from twoaxis.testing.toy import ATTENTION, FEED_FORWARD, toy_decoder, toy_tokens

PAIRS = [
    pytest.param(depth.example(d), sequence.example(s), id=f"{depth.kind}-{d}-{sequence.kind}-{s}")
    for depth in DEPTH
    for d in depth.examples
    for sequence in SEQUENCE
    for s in sequence.examples
]


@pytest.mark.parametrize(("depth", "sequence"), PAIRS)
def test_pair(depth: DepthConfig, sequence: SequenceConfig) -> None:
    model = toy_decoder(depth, n_layers=2, blocks=((sequence, ATTENTION, FEED_FORWARD),))
    tokens = toy_tokens()
    full = model(tokens)
    full.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    with torch.no_grad():
        for chunks in ((1,) * 9, (4, 1, 4)):
            assert torch.allclose(decode(model, tokens, chunks), full, rtol=0, atol=1e-10)
