"""From a corpus to shards, and the cache in between."""

import math
from pathlib import Path

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, processors

from twoaxis.core.errors import ConfigError, DataError
from twoaxis.data import Packing, prepare, validation_batches
from twoaxis.data.tokenizer import ByteTokenizer
from twoaxis.train.trainer import evaluate

from ..fresh import run_fresh

TEXT = "the cat sat on the mat and the dog sat on the cat\n" * 20


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    (tmp_path / "corpus.txt").write_text(TEXT)
    return str(tmp_path / "corpus.txt")


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "texts").mkdir()
    for number in range(20):
        (tmp_path / "texts" / f"{number:02}.txt").write_text(f"text number {number}\n" * (number + 1))
    return str(tmp_path / "texts")


@pytest.mark.parametrize("tokenizer", ["byte", {"kind": "bpe", "vocab_size": 270}])
def test_the_shards_hold_the_text_of_each_side(corpus: str, tmp_path: Path, tokenizer: object) -> None:
    data = prepare(corpus, tokenizer, tmp_path / "cache")  # pyright: ignore[reportArgumentType]
    assert data.tokenizer.decode(data.train.tokens.tolist()) == TEXT[:950]
    assert data.tokenizer.decode(data.validation.tokens.tolist()) == TEXT[950:]
    assert (data.train.header.text_bytes, data.validation.header.text_bytes) == (950, 50)


def test_every_document_ends_with_the_end_marker(folder: str, tmp_path: Path) -> None:
    data = prepare(folder, {"kind": "bpe", "vocab_size": 270}, tmp_path / "cache")
    ends = [*data.train.starts.tolist()[1:], len(data.train)]
    assert len(ends) == len(list(data.corpus.documents("train"))) > 10
    assert {int(data.train.tokens[end - 1]) for end in ends} == {data.tokenizer.end_of_document}
    assert (data.train.tokens == data.tokenizer.end_of_document).sum() == len(ends)


def test_byte_documents_have_no_end_marker(folder: str, tmp_path: Path) -> None:
    data = prepare(folder, "byte", tmp_path / "cache")
    assert len(data.train) == data.train.header.text_bytes
    assert len(data.train.starts) == len(list(data.corpus.documents("train")))


def test_the_second_call_encodes_nothing(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepare(folder, "byte", tmp_path / "cache")
    monkeypatch.setattr(ByteTokenizer, "encode_array", lambda *_: pytest.fail("encoded again"))
    second = prepare(folder, "byte", tmp_path / "cache", lambda *_: pytest.fail("made progress"))
    assert (second.train.fingerprint, second.to_data()) == (first.train.fingerprint, first.to_data())


def test_a_changed_text_or_division_gives_new_shards(corpus: str, tmp_path: Path) -> None:
    first = prepare(corpus, "byte", tmp_path / "cache")
    divided = prepare({"kind": "text", "path": corpus, "validation_fraction": 0.1}, "byte", tmp_path / "cache")
    Path(corpus).write_text(TEXT.replace("cat", "cow"))
    changed = prepare(corpus, "byte", tmp_path / "cache")
    assert len({first.train.path, divided.train.path, changed.train.path}) == 3
    assert b"cow" in changed.train.tokens.astype("uint8").tobytes()


def test_a_damaged_shard_is_named(corpus: str, tmp_path: Path) -> None:
    path = prepare(corpus, "byte", tmp_path / "cache").train.path
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"{path}: is damaged.* delete the file"):
        prepare(corpus, "byte", tmp_path / "cache")


def test_a_shard_of_another_corpus_is_refused(corpus: str, folder: str, tmp_path: Path) -> None:
    path = prepare(corpus, "byte", tmp_path / "cache").train.path
    path.write_bytes(prepare(folder, "byte", tmp_path / "cache").train.path.read_bytes())
    with pytest.raises(DataError, match="belongs to another corpus or tokenizer"):
        prepare(corpus, "byte", tmp_path / "cache")


def test_a_corpus_that_changes_meanwhile_is_noticed(corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = ByteTokenizer.encode_array

    def change(self: ByteTokenizer, text: str):
        Path(corpus).write_text(TEXT.replace("cat", "cow"))
        return encode(self, text)

    monkeypatch.setattr(ByteTokenizer, "encode_array", change)
    with pytest.raises(DataError, match=r"'corpus\.txt' changed while it was read"):
        prepare(corpus, "byte", tmp_path / "cache")
    # Training text was complete before the change.
    assert [path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()] == ["train.tokens"]


def test_an_interrupted_call_is_made_good_by_the_next(folder: str, tmp_path: Path) -> None:
    def interrupt(stage: str, done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(folder, "byte", tmp_path / "cache", interrupt)
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert len(prepare(folder, "byte", tmp_path / "cache").train) > 0


def test_progress_ends_at_the_whole_text(folder: str, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    data = prepare(folder, "byte", tmp_path / "cache", lambda *report: seen.append(report))
    total = data.corpus.scan.text_bytes
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert len(seen) == 20 and seen[-1] == ("encoding", total, total)


def test_bits_per_byte(corpus: str, tmp_path: Path) -> None:
    assert prepare(corpus, "byte", tmp_path / "cache").bits_per_byte(8 * math.log(2)) == pytest.approx(8)
    data = prepare(corpus, {"kind": "bpe", "vocab_size": 270}, tmp_path / "cache")
    assert data.bits_per_byte(math.log(2)) == pytest.approx(len(data.validation) / 50)


@pytest.mark.parametrize("packing", ["isolated", "joined"])
def test_begin_markers_count_where_they_are_targets(packing: Packing, folder: str, tmp_path: Path) -> None:
    """Bits per byte were once higher than those of `twoaxis evaluate` on the same text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    engine = tokenizers.Tokenizer(models.BPE(vocab={one: number for number, one in enumerate(alphabet)}, merges=[]))
    engine.pre_tokenizer, engine.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    engine.add_special_tokens(["<s>"])
    engine.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    engine.save(str(tmp_path / "tokenizer.json"))
    data = prepare(folder, str(tmp_path / "tokenizer.json"), tmp_path / "cache")
    batches = validation_batches(data.validation, 4, 10, len(data.validation), packing)
    eight_bits = evaluate(lambda batch: torch.tensor(8 * math.log(2) * batch.n_targets), batches, data)
    header = data.validation.header
    paid = header.text_bytes if packing == "isolated" else header.n_tokens
    assert header.n_tokens == header.text_bytes + header.n_documents
    assert eight_bits.bpb == pytest.approx(8 * paid / header.text_bytes)


def test_the_record_names_corpus_tokenizer_and_shards(corpus: str, tmp_path: Path) -> None:
    data = prepare(corpus, "byte", tmp_path / "cache")
    record = data.to_data()
    assert record["corpus"] == data.corpus.to_data() and record["corpus"]["name"] == "corpus.txt"
    assert record["tokenizer"] == {"vocab_size": 256, "fingerprint": data.tokenizer.fingerprint}
    assert record["train"] == {"tokens": 950, "documents": 1, "text_bytes": 950, "fingerprint": data.train.fingerprint}


def test_an_unknown_corpus_or_tokenizer_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="did you mean 'sotu'"):
        prepare("sotuu")
    with pytest.raises(ConfigError, match="did you mean 'byte'"):
        prepare("sotu", "bytee")


def test_importing_data_loads_neither_tokenizers_nor_pyarrow() -> None:
    code = "import sys, twoaxis.data; print(sorted({'tokenizers', 'pyarrow', 'pandas', 'sotu'} & set(sys.modules)))"
    assert run_fresh(code).stdout.strip() == "[]"


def test_a_cache_folder_below_an_unknown_home_is_one_line(corpus: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOAXIS_CACHE", "~nobody-is-called-so/cache")
    with pytest.raises(DataError, match=r"^cache folder ~nobody-is-called-so/cache: its home folder is unknown; set "):
        prepare(corpus, "byte")
