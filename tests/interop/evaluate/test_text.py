"""Perplexity of texts: every token scored once, whatever the windows, and bits over bytes of UTF-8."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, normalizers

from twoaxis import ConfigError, DataError, Decoder, DecoderConfig
from twoaxis.data.tokenizer import ByteTokenizer, SubwordTokenizer
from twoaxis.interop.evaluate import score_texts, text_passage, total_score
from twoaxis.model.likelihood import Passage, loglikelihood, loglikelihoods, windows

from ...checkpoints.hf_folder import byte_tokenizer
from ..small_tokenizer import subword

LONGEST = 8
TEXT = "Zoë: 日本 \N{GRINNING FACE} and of the House, the Senate."
ATTENTION = {"kind": "attention", "n_heads": 2}


def small(blocks: list[object], max_seq_len: int = LONGEST) -> Decoder:
    """The same float64 weights, away from their start, whatever max_seq_len is."""
    sizes = {"vocab_size": 280, "d_model": 8, "n_layers": 1, "max_seq_len": max_seq_len}
    model = Decoder.build(DecoderConfig.from_data({**sizes, "blocks": [blocks]})).double().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return model


@pytest.fixture(scope="module")
def model() -> Decoder:
    return small([ATTENTION, "short_conv", "swiglu"])


@torch.no_grad()
def by_hand(model: Decoder, tokens: list[int], first: int, stride: int) -> float:
    """One pass for each token, with the context that the protocol promises it."""
    nats = 0.0
    for index in range(first, len(tokens)):
        later = max(0, math.ceil((index - LONGEST) / stride))
        last = min(LONGEST + later * stride, len(tokens) - 1)
        read = torch.tensor([tokens[max(0, last - LONGEST) : index]])
        nats += float(torch.log_softmax(model(read)[0, -1], dim=-1)[tokens[index]])  # type: ignore[index]
    return nats


def test_text_that_a_tokenizer_loses_is_paid_for(model: Decoder) -> None:
    """Bits per byte of a text that became nothing were once those of nothing."""
    engine = byte_tokenizer()
    engine.normalizer = normalizers.Replace(Regex("[^ -~]"), "")
    lossy = SubwordTokenizer(engine.to_str())
    [whole, lost] = score_texts(model, lossy, {"ASCII": "of the House", "Cyrillic": "a Привет"})
    assert whole.restored.repair_bits == 0 and whole.bpb == whole.nats / math.log(2) / whole.text_bytes
    assert lost.to_data()["lost_bytes"] == 12 and lost.to_data()["repair_bits"] > 8 * 12
    assert lost.bpb == (lost.nats / math.log(2) + lost.restored.repair_bits) / lost.text_bytes > 8 * 12 / 14
    assert total_score([whole, lost]).restored == whole.restored + lost.restored
    assert lost.restored.words("Cyrillic").startswith("the tokenizer loses 85.7 % of Cyrillic (12 of 14 bytes)")


@given(st.integers(1, 40), st.integers(0, 60), st.integers(1, 12), st.data())
def test_windows_score_each_token_once(first: int, scored: int, longest: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, longest))
    found = list(windows(first, first + scored, longest, stride))
    assert [token for one in found for token in range(one.first, one.last)] == list(range(first, first + scored))
    for one in found:
        assert 0 <= one.begin < one.first and one.last - 1 - one.begin <= longest
        # A token reads whatever there is, or what the stride leaves of a window; a single window reaches as far back as fits.
        assert one.begin == 0 or one.last - 1 - one.begin == longest
        assert one.first - one.begin >= min(one.first, longest - stride + 1) or len(found) == 1


@pytest.mark.parametrize("stride", [1, 3, LONGEST // 2, LONGEST])
@pytest.mark.parametrize("length", [1, LONGEST, LONGEST + 1, 21])
def test_equals_one_pass_for_each_token(model: Decoder, length: int, stride: int) -> None:
    tokens = [(7 * i * i + 3) % 280 for i in range(length + 1)]
    [found] = loglikelihoods(model, [Passage(torch.tensor(tokens), 1)], batch_size=3, stride=stride)
    assert found.tokens == length
    assert found.nats == pytest.approx(by_hand(model, tokens, 1, stride), rel=1e-12)


def test_neither_batches_nor_neighbours_change_a_score(model: Decoder) -> None:
    texts = {"a": TEXT, "b": "x", "c": TEXT[::-1] * 2}
    for tokenizer in (ByteTokenizer(), subword()):
        together = score_texts(model, tokenizer, texts, batch_size=64)
        for name, text in texts.items():
            [alone] = score_texts(model, tokenizer, {name: text}, batch_size=1)
            twin = together[list(texts).index(name)]
            assert alone.nats == pytest.approx(twin.nats, rel=1e-12) and alone[:3] == twin[:3]
        total = total_score(together)
        assert total.nats == sum(one.nats for one in together)
        assert total.text_bytes == sum(len(text.encode()) for text in texts.values())


@pytest.mark.parametrize("stride", [1, 2, 4, 5])
def test_windows_do_not_show_when_the_model_sees_less(stride: int) -> None:
    local = [{"kind": "short_swa", "n_heads": 2, "window": 4}, "swiglu"]
    whole = score_texts(small(local, max_seq_len=1024), subword(), {"text": TEXT * 3})
    [cut] = score_texts(small(local), subword(), {"text": TEXT * 3}, stride=stride)
    assert cut.nats == pytest.approx(whole[0].nats, rel=1e-12)
    # The stride of no overlap leaves the first token of a window one token to look at.
    [bare] = score_texts(small(local), subword(), {"text": TEXT * 3}, stride=LONGEST)
    assert abs(bare.nats - whole[0].nats) > 1e-3


def test_the_first_token(model: Decoder) -> None:
    ids = subword().encode(TEXT)
    [ended] = score_texts(model, subword(), {"text": TEXT})
    assert ended.tokens == len(ids)
    assert -ended.nats == pytest.approx(loglikelihood(model, [], ids, subword().end_of_document).nats, rel=1e-12)
    data = list(TEXT.encode())
    [bare] = score_texts(model, ByteTokenizer(), {"text": TEXT})
    assert bare.tokens == len(data)
    rest = loglikelihoods(model, [Passage(torch.tensor(data), 1)])[0].nats
    assert -bare.nats == pytest.approx(rest - math.log(280), rel=1e-12)
    assert not loglikelihoods(model, [text_passage(ByteTokenizer(), "a")])[0].greedy


def test_bits_per_byte_counts_bytes_not_characters(model: Decoder) -> None:
    uniform = small(["swiglu"])
    with torch.no_grad():
        uniform.embedding.weight.zero_()
    for tokenizer in (ByteTokenizer(), subword()):
        [score] = score_texts(uniform, tokenizer, {"text": TEXT})
        tokens, text_bytes = len(tokenizer.encode(TEXT)), len(TEXT.encode())
        assert (score.tokens, score.text_bytes) == (tokens, text_bytes)
        assert text_bytes > len(TEXT) and score.bpb == pytest.approx(tokens * math.log2(280) / text_bytes, rel=1e-12)
        assert score.perplexity == pytest.approx(280, rel=1e-12) and score.loss == pytest.approx(math.log(280), rel=1e-12)


def test_what_cannot_be_scored(model: Decoder) -> None:
    with pytest.raises(DataError, match="text='none': must be at least one token; name a longer text"):
        score_texts(model, subword(), {"none": ""})
    for stride in (0, LONGEST + 1):
        with pytest.raises(ConfigError, match=rf"stride={stride}: must be in 1..max_seq_len={LONGEST}"):
            score_texts(model, subword(), {"text": TEXT}, stride=stride)
    with pytest.raises(ConfigError, match="batch_size=0: must be >= 1"):
        score_texts(model, subword(), {"text": TEXT}, batch_size=0)
    broken = small(["swiglu"])
    with torch.no_grad():
        broken.embedding.weight.fill_(torch.nan)
    with pytest.raises(DataError, match="its loss is nan: must be a number"):
        score_texts(broken, subword(), {"text": TEXT})


def test_progress_ends_with_everything(model: Decoder) -> None:
    seen: list[tuple[str, int, int]] = []
    [score] = score_texts(model, subword(), {"text": TEXT}, batch_size=1, progress=lambda *now: seen.append(now))
    assert seen[-1] == ("scoring", score.tokens, score.tokens) and len(seen) > 1
