"""The checks on examples of every sequence mixer, plus what only single cases need."""

import pytest
import torch

from twoaxis.core.errors import ConfigError
from twoaxis.core.layout import TokenLayout
from twoaxis.model import Decoder
from twoaxis.sequence import SEQUENCE, AttentionConfig, SequenceConfig, ShortSWAConfig
from twoaxis.testing import Check, sequence_checks
from twoaxis.testing.decoding import decode
from twoaxis.testing.toy import TOKENS, decoder_config, toy_context, toy_decoder, toy_mixer, toy_tokens

from .matrix import cases


@pytest.mark.parametrize(("config", "check"), cases(SEQUENCE, sequence_checks()))
def test_conformance(config: SequenceConfig, check: Check) -> None:
    check.run(config)


def test_short_swa_over_all_tokens_is_full_attention() -> None:
    short = toy_mixer(ShortSWAConfig(n_heads=2, n_kv_heads=2, window=TOKENS))
    full = toy_mixer(AttentionConfig(n_heads=2))
    layout = TokenLayout.contiguous(TOKENS)
    assert torch.allclose(short(toy_context(), layout)[0], full(toy_context(), layout)[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("prompt", [3, 4, 5, 8, 9])
def test_greedy_continuation_around_the_window_equals_recomputing_everything(prompt: int) -> None:
    model = toy_decoder(AttentionConfig(n_heads=2, window=4))
    tokens, cache = toy_tokens(tokens=prompt), model.new_cache()
    with torch.no_grad():
        logits, cache = model(tokens, None, cache)
        for _ in range(6):
            expected = model(tokens)[:, -1]
            assert torch.allclose(logits[:, -1], expected, rtol=0, atol=1e-11)
            following = expected.argmax(-1, keepdim=True)
            assert torch.equal(logits[:, -1].argmax(-1, keepdim=True), following)
            tokens = torch.cat((tokens, following), dim=1)
            logits, cache = model(following, None, cache)


def test_prefill_longer_than_the_window() -> None:
    model, tokens = toy_decoder(AttentionConfig(n_heads=2, window=4)), toy_tokens(tokens=10)
    full = model(tokens)
    for chunks in ((10,), (3, 3, 4), (1,) * 10):
        with torch.no_grad():
            assert torch.allclose(decode(model, tokens, chunks), full, rtol=0, atol=1e-11)


def test_decoding_past_the_longest_sequence_says_so() -> None:
    model = Decoder.build(decoder_config(AttentionConfig(n_heads=2), max_seq_len=16))
    tokens = toy_tokens(batch=1, tokens=12)
    _, cache = model(tokens, None, model.new_cache())
    for _ in range(4):
        _, cache = model(tokens[:, :1], None, cache)
    with pytest.raises(ConfigError, match=r"tokens=17: must be at most max_seq_len=16"):
        model(tokens[:, :1], None, cache)
