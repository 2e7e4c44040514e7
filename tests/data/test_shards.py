"""Token shards: every id survives, and no damaged or foreign file is read."""

import dataclasses
import errno
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twoaxis.core.errors import DataError
from twoaxis.data.shards import (
    HEADER_BYTES,
    MAGIC,
    ShardHeader,
    TokenShard,
    read_header,
    shard_writer,
    token_dtype,
    write_shard,
)


@pytest.fixture
def shard(tmp_path: Path) -> TokenShard:
    write_shard(tmp_path / "a.tokens", [[1, 2, 3], [4, 5]], vocab_size=6, tokenizer="t", corpus="c")
    return TokenShard.open(tmp_path / "a.tokens")


def replace_header(shard: TokenShard, **changes: object) -> None:
    content = bytearray(shard.path.read_bytes())
    content[:HEADER_BYTES] = dataclasses.replace(shard.header, **changes).pack()
    shard.path.write_bytes(content)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(50257, "uint16"), (65536, "uint16"), (65537, "uint32"), (100277, "uint32")])
def test_ids_at_the_edge_of_16_bits_survive(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    ids = [token for token in (0, 65535, 65536, vocab_size - 1) if token < vocab_size]
    write_shard(tmp_path / "a", [ids], vocab_size=vocab_size)
    shard = TokenShard.open(tmp_path / "a")
    assert shard.tokens.tolist() == ids
    assert shard.header.dtype == token_dtype(vocab_size) == dtype


def test_32_bit_ids_are_not_read_as_16_bit_ids(tmp_path: Path) -> None:
    write_shard(tmp_path / "a", [[0, 65535, 65536, 100276]], vocab_size=100277)
    shard = TokenShard.open(tmp_path / "a")
    replace_header(shard, dtype="uint16")
    with pytest.raises(DataError, match="has dtype uint16; must be uint32 for vocab_size 100277"):
        TokenShard.open(shard.path)
    replace_header(shard, dtype="uint16", vocab_size=65536)
    with pytest.raises(DataError, match="bytes; must have"):
        TokenShard.open(shard.path)


@pytest.mark.parametrize("ids", [[0, 6], [-1], np.array([70000], dtype=np.uint32), [2**40], np.array([0.5])], ids=str)
def test_an_id_outside_the_vocabulary_is_refused_and_nothing_is_written(tmp_path: Path, ids: list) -> None:
    with pytest.raises(DataError, match=r"in document 1: must be an integer from 0 to 5"):
        write_shard(tmp_path / "a", [[1, 2], ids], vocab_size=6)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("ids", [[[1, 2], [3, 4]], np.ones((1, 3), dtype=int), "text"], ids=str)
def test_several_rows_are_not_one_document(tmp_path: Path, ids: list) -> None:
    with pytest.raises(DataError, match=r"^document 1: has ids of shape \[.*\]; must be one row; add each row as a document$"):
        write_shard(tmp_path / "a", [[1, 2], ids], vocab_size=6)
    assert not list(tmp_path.iterdir())


@given(st.lists(st.lists(st.integers(0, 299), max_size=9), max_size=9), st.sampled_from([300, 65537]))
def test_documents_are_read_back(tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], vocab_size: int) -> None:
    path = tmp_path_factory.mktemp("shard") / "a"
    full = [ids for ids in documents if ids]
    if not full:
        with pytest.raises(DataError, match="no document has a token"):
            write_shard(path, documents, vocab_size=vocab_size)
        return
    write_shard(path, documents, vocab_size=vocab_size)
    shard = TokenShard.open(path)
    ends = [*shard.starts.tolist()[1:], len(shard)]
    assert [shard.window(start, end).tolist() for start, end in zip(shard.starts.tolist(), ends, strict=True)] == full
    numbers = [number for number, ids in enumerate(full) for _ in ids]
    assert shard.document_numbers(np.arange(len(shard))).tolist() == numbers


def test_the_header_says_what_is_inside(tmp_path: Path) -> None:
    with shard_writer(tmp_path / "a", vocab_size=256, tokenizer="t", corpus="c") as writer:
        writer.add([1, 2, 3], text_bytes=7)
        writer.add([], text_bytes=0)
        writer.add([4], text_bytes=2)
    header = TokenShard.open(tmp_path / "a").header
    assert (header.n_tokens, header.n_documents, header.text_bytes) == (4, 2, 9)
    assert (header.vocab_size, header.tokenizer, header.corpus) == (256, "t", "c")


def test_equal_shards_have_equal_fingerprints(tmp_path: Path) -> None:
    variants = {
        "a": ([[1, 2], [3]], "t"),
        "same": ([[1, 2], [3]], "t"),
        "token": ([[1, 2], [4]], "t"),
        "boundary": ([[1], [2, 3]], "t"),
        "tokenizer": ([[1, 2], [3]], "u"),
    }
    found = {}
    for name, (documents, tokenizer) in variants.items():
        write_shard(tmp_path / name, documents, vocab_size=9, tokenizer=tokenizer)
        found[name] = TokenShard.open(tmp_path / name).fingerprint
    assert found["a"] == found["same"] and len(set(found.values())) == 4


def test_every_flipped_bit_is_noticed(shard: TokenShard) -> None:
    content = shard.path.read_bytes()
    written = len(content[:HEADER_BYTES].rstrip(b"\0"))
    for position in [*range(written), *range(written, HEADER_BYTES, 101), *range(HEADER_BYTES, len(content))]:
        damaged = bytearray(content)
        damaged[position] ^= 1 << position % 8
        shard.path.write_bytes(damaged)
        with pytest.raises(DataError) as caught:
            TokenShard.open(shard.path)
        assert str(shard.path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("kept", [0, 7, 8, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 9, -1])
def test_a_file_cut_short_is_refused(shard: TokenShard, kept: int) -> None:
    shard.path.write_bytes(shard.path.read_bytes()[:kept])
    with pytest.raises(DataError, match="is not a token shard" if 0 <= kept < 8 else "bytes; must have"):
        TokenShard.open(shard.path)


def test_a_file_that_is_too_long_or_missing_is_refused(shard: TokenShard, tmp_path: Path) -> None:
    shard.path.write_bytes(shard.path.read_bytes() + b"\0")
    with pytest.raises(DataError, match="bytes; must have"):
        TokenShard.open(shard.path)
    with pytest.raises(DataError, match=r"missing: cannot be read \(No such file"):
        TokenShard.open(tmp_path / "missing")


def test_another_kind_or_version_of_file_is_refused(shard: TokenShard) -> None:
    content = shard.path.read_bytes()
    shard.path.write_bytes(b"PK" + content[2:])
    with pytest.raises(DataError, match=r"must begin with b'2AXTOKEN'"):
        TokenShard.open(shard.path)
    shard.path.write_bytes(MAGIC + b"\2" + content[len(MAGIC) + 1 :])
    with pytest.raises(DataError, match="has format version 2; must be 1"):
        TokenShard.open(shard.path)


def test_opening_finds_a_changed_token(shard: TokenShard) -> None:
    content = bytearray(shard.path.read_bytes())
    content[HEADER_BYTES] ^= 1
    shard.path.write_bytes(content)
    with pytest.raises(DataError, match="is damaged: sha256"):
        TokenShard.open(shard.path)


def test_verify_finds_ids_outside_the_vocabulary(shard: TokenShard) -> None:
    replace_header(shard, vocab_size=5)
    with pytest.raises(DataError, match="holds token id 5; must be below 5"):
        TokenShard.open(shard.path)


def test_a_header_packs_to_its_own_size() -> None:
    header = ShardHeader("uint16", 256, 10, 1, 10, "t" * 64, "c" * 64, "s" * 64)
    assert len(header.pack()) == HEADER_BYTES and read_header(header.pack(), "a") == header


def test_an_impossible_vocabulary_is_refused() -> None:
    for vocab_size in (0, 2**32 + 1):
        with pytest.raises(DataError, match=f"vocab_size={vocab_size}"):
            token_dtype(vocab_size)


def test_a_full_disk_keeps_the_old_shard(shard: TokenShard, monkeypatch: pytest.MonkeyPatch) -> None:
    before = shard.path.read_bytes()

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(DataError, match=r"a\.tokens: cannot be written \(No space left on device\).* set TWOAXIS_CACHE"):
        write_shard(shard.path, [[1]], vocab_size=6)
    assert shard.path.read_bytes() == before and list(shard.path.parent.iterdir()) == [shard.path]
