"""Tokenizers lose nothing, know their end marker, and describe themselves in full."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, processors

from twoaxis.core.config import Config
from twoaxis.core.errors import ConfigError, DataError
from twoaxis.data.corpus import Corpus, TextConfig
from twoaxis.data.tokenizer import (
    END_OF_DOCUMENT,
    TOKENIZERS,
    BpeConfig,
    ByteTokenizer,
    FileTokenizerConfig,
    SubwordTokenizer,
    Tokenizer,
    TokenizerField,
    load_tokenizer,
    parse_tokenizer,
)
from twoaxis.data.tokenizer.subword import pieces_of, train_bpe

TEXT = "the cat sat on the mat\n        and the dog sat on the cat\n" * 20 + "zygomorphic zygomorphic zygomorphic"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    path = tmp_path_factory.mktemp("corpus") / "a.txt"
    path.write_text(TEXT)
    return Corpus.open(TextConfig(path=path, validation_fraction=0.05))


@pytest.fixture(scope="module")
def bpe(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> SubwordTokenizer:
    return BpeConfig(vocab_size=270).build(corpus, tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module", params=["byte", "bpe"])
def tokenizer(request: pytest.FixtureRequest, bpe: SubwordTokenizer) -> Tokenizer:
    return ByteTokenizer() if request.param == "byte" else bpe


def any_text() -> st.SearchStrategy[str]:
    fragments = st.sampled_from(
        [END_OF_DOCUMENT, "\r\n", "  the", "x    y", "\u00a0", "\u2029", "\ufeff", "e\u0301", "\U0001f642\u200d", "'s", "\0"]
    )
    return st.lists(st.text() | fragments).map("".join)


@given(text=any_text())
def test_decoding_restores_any_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= token < tokenizer.vocab_size and token != tokenizer.end_of_document for token in ids)


def test_bytes_are_256_ids_without_an_end_marker() -> None:
    tokenizer = ByteTokenizer()
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (256, None)
    assert tokenizer.encode("\u00e9") == [0xC3, 0xA9]
    assert tokenizer.decode([0xC3]) == "\ufffd"


def test_the_end_marker_of_bpe_is_inside_the_vocabulary(bpe: SubwordTokenizer) -> None:
    assert bpe.vocab_size == 270
    assert bpe.end_of_document is not None and 0 <= bpe.end_of_document < 270
    assert bpe.decode([*bpe.encode("the"), bpe.end_of_document]) == "the"


def test_bpe_merges_what_is_frequent(bpe: SubwordTokenizer) -> None:
    assert len(bpe.encode("the cat sat on the mat")) <= 8


def test_bpe_is_trained_on_the_training_side_only_and_may_stay_small(corpus: Corpus, tmp_path: Path) -> None:
    tokenizer = BpeConfig(vocab_size=60000).build(corpus, tmp_path)
    assert 257 < tokenizer.vocab_size < 1000
    assert len(tokenizer.encode(" dog")) == 1
    assert len(tokenizer.encode("zygomorphic")) == len("zygomorphic")


def test_training_is_deterministic(corpus: Corpus) -> None:
    assert train_bpe(corpus, 300) == train_bpe(corpus, 300)


@given(text=any_text(), characters=st.integers(1, 20))
def test_long_texts_are_cut_where_the_tokenizer_cuts(bpe: SubwordTokenizer, text: str, characters: int) -> None:
    pieces = list(pieces_of(text, characters))
    assert "".join(pieces) == text
    assert [token for piece in pieces for token in bpe.encode(piece)] == bpe.encode(text)


def test_the_definition_is_the_whole_tokenizer(tokenizer: Tokenizer) -> None:
    copy = load_tokenizer(tokenizer.definition)
    assert copy.fingerprint == tokenizer.fingerprint
    assert (copy.vocab_size, copy.end_of_document) == (tokenizer.vocab_size, tokenizer.end_of_document)
    assert copy.encode(TEXT) == tokenizer.encode(TEXT)


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"kind": "word"}', '{"kind": "subword", "tokenizer": {}, "end_of_document": null}']
)
def test_a_wrong_definition_is_a_data_error_in_one_line(text: str) -> None:
    with pytest.raises(DataError) as caught:
        load_tokenizer(text)
    assert "\n" not in str(caught.value)


def test_encode_and_encode_array_agree(tokenizer: Tokenizer) -> None:
    assert np.array_equal(tokenizer.encode_array(TEXT), tokenizer.encode(TEXT))


def test_half_a_surrogate_pair_and_unknown_ids_are_data_errors(tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match="text: character 1 is half of a surrogate pair"):
        tokenizer.encode("a\ud800")
    with pytest.raises(DataError, match=f"must be from 0 to {tokenizer.vocab_size - 1}"):
        tokenizer.decode([tokenizer.vocab_size])
    with pytest.raises(DataError, match="token id -1"):
        tokenizer.decode([-1])


def word_level(path: Path) -> Path:
    engine = tokenizers.Tokenizer(models.WordLevel({"the": 0, "cat": 1, "[UNK]": 2, "<end>": 6}, unk_token="[UNK]"))
    engine.pre_tokenizer = pre_tokenizers.Whitespace()
    engine.enable_truncation(2)
    engine.enable_padding(length=8)
    engine.save(str(path))
    return path


def test_any_tokenizer_file_is_read_without_its_truncation_and_padding(corpus: Corpus, tmp_path: Path) -> None:
    path = word_level(tmp_path / "tokenizer.json")
    tokenizer = FileTokenizerConfig(path=path, end_of_document="<end>").build(corpus)
    assert tokenizer.encode("the cat the dog") == [0, 1, 0, 2]
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (7, 6)
    assert FileTokenizerConfig(path=path).build(corpus).fingerprint != tokenizer.fingerprint


def test_a_wrong_tokenizer_file_is_a_data_error_in_one_line(corpus: Corpus, tmp_path: Path) -> None:
    path = word_level(tmp_path / "tokenizer.json")
    (tmp_path / "broken.json").write_text(path.read_text()[:-30])
    (tmp_path / "other.json").write_text(json.dumps({"hello": 1}))
    cases = {
        "cannot be read": FileTokenizerConfig(path=tmp_path / "missing.json"),
        "broken.json: is not a tokenizer.json": FileTokenizerConfig(path=tmp_path / "broken.json"),
        "other.json: is not a tokenizer.json": FileTokenizerConfig(path=tmp_path / "other.json"),
        "did you mean '<end>'": FileTokenizerConfig(path=path, end_of_document="<ende>"),
    }
    for message, config in cases.items():
        with pytest.raises(DataError) as caught:
            config.build(corpus)
        assert message in str(caught.value) and "\n" not in str(caught.value)


class Holder(Config):
    tokenizer: TokenizerField = TOKENIZERS.parse("byte")


@pytest.mark.parametrize("short", ["byte", "bpe", {"kind": "bpe", "vocab_size": 512}, "gpt2/tokenizer.json"])
def test_a_bare_kind_or_path_is_a_tokenizer(short: object) -> None:
    config = Holder.from_data({"tokenizer": short})
    assert Holder.from_data(config.to_data()) == config
    assert config.tokenizer == parse_tokenizer(short)


@pytest.mark.parametrize(
    ("data", "message"),
    [("bytes", "did you mean 'byte'"), ({"kind": "bpe", "vocab_size": 256}, "257"), ({"kind": "file"}, "path is missing")],
)
def test_a_wrong_configuration_is_a_config_error(data: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Holder.from_data({"tokenizer": data})


def _letters(post_processor: Any) -> SubwordTokenizer:
    engine = tokenizers.Tokenizer(models.BPE(vocab={"0": 0, "1": 1}, merges=[]))
    engine.add_special_tokens(["<s>", "</s>"])
    engine.post_processor = post_processor
    return SubwordTokenizer(engine.to_str(), "</s>")


def _template(single: str) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(single=single, special_tokens=[("<s>", 2), ("</s>", 3)])


@pytest.mark.parametrize(
    ("post_processor", "begin"),
    [
        (None, ()),
        (processors.ByteLevel(), ()),
        (_template("<s> $A"), (2,)),
        (_template("<s> $A </s>"), (2,)),
        (_template("$A </s>"), ()),
        (_template("</s> <s> $A"), (3, 2)),
        (processors.Sequence([processors.ByteLevel(), _template("<s> $A")]), (2,)),
        (processors.BertProcessing(("</s>", 3), ("<s>", 2)), (2,)),
        (processors.RobertaProcessing(("</s>", 3), ("<s>", 2)), (2,)),
    ],
    ids=str,
)
def test_documents_begin_with_what_the_file_puts_before_texts(post_processor: Any, begin: tuple[int, ...]) -> None:
    tokenizer = _letters(post_processor)
    assert tokenizer.begin_of_document == begin
    # None of its letters stands in the vocabulary.
    assert tokenizer.prompt("zz") == ([*begin] or [3])
    assert tokenizer.prompt("01") == [*begin, 0, 1]
    again = load_tokenizer(tokenizer.definition)
    assert again.definition == tokenizer.definition and again.begin_of_document == begin


def test_a_run_from_before_begins_its_documents_with_nothing() -> None:
    recorded = json.loads(_letters(_template("<s> $A")).definition)
    del recorded["begin_of_document"]
    tokenizer = load_tokenizer(json.dumps(recorded))
    assert tokenizer.begin_of_document == () and tokenizer.prompt("01") == [0, 1]
    assert json.loads(tokenizer.definition) == recorded
