"""Writing token shards, one document after the other."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np

from twoaxis.core.atomic import replacing
from twoaxis.core.errors import DataError
from twoaxis.data.cache import CACHE_REMEDY
from twoaxis.data.shard_format import HEADER_BYTES, ShardHeader, padding, token_dtype

Ids = Sequence[int] | np.ndarray


class ShardWriter:
    """Adds documents to a shard that `shard_writer` has opened."""

    def __init__(self, file: BinaryIO, path: Path, vocab_size: int, tokenizer: str, corpus: str) -> None:
        self._file, self._path = file, path
        self._dtype = token_dtype(vocab_size)
        self._vocab_size, self._tokenizer, self._corpus = vocab_size, tokenizer, corpus
        self._digest = hashlib.sha256()
        self._starts: list[int] = []
        self._n_tokens = self._text_bytes = 0
        file.write(bytes(HEADER_BYTES))

    def add(self, ids: Ids, text_bytes: int = 0, name: str = "") -> None:
        """Appends one document; a document without tokens is left out.

        Args:
            ids: its token ids.
            text_bytes: bytes of its text in UTF-8.
            name: what an error calls it; by default its number.

        Raises:
            DataError: an id outside the vocabulary.
        """
        tokens = np.asarray(ids)
        if not tokens.size:
            return
        low, high = int(tokens.min()), int(tokens.max())
        if tokens.dtype.kind not in "iu" or low < 0 or high >= self._vocab_size:
            wrong = low if low < 0 else high
            raise DataError(
                f"token id {wrong} in document {name or len(self._starts)}: must be an integer from 0 to "
                f"{self._vocab_size - 1}; use the vocab_size of the tokenizer that made the ids"
            )
        self._starts.append(self._n_tokens)
        self._n_tokens += tokens.size
        self._text_bytes += text_bytes
        self._write(tokens.astype(np.dtype(self._dtype).newbyteorder("<")).tobytes())

    def finish(self) -> None:
        """Writes what comes after the tokens, then the header.

        Raises:
            DataError: there are no tokens.
        """
        if not self._n_tokens:
            raise DataError(f"{self._path}: no document has a token; must have at least one; use a longer corpus")
        self._write(bytes(padding(self._n_tokens * np.dtype(self._dtype).itemsize)))
        self._write(np.asarray(self._starts, dtype="<u8").tobytes())
        header = ShardHeader(
            dtype=self._dtype,
            vocab_size=self._vocab_size,
            n_tokens=self._n_tokens,
            n_documents=len(self._starts),
            text_bytes=self._text_bytes,
            tokenizer=self._tokenizer,
            corpus=self._corpus,
            sha256=self._digest.hexdigest(),
        )
        self._file.seek(0)
        self._file.write(header.pack())

    def _write(self, content: bytes) -> None:
        self._digest.update(content)
        self._file.write(content)


@contextmanager
def shard_writer(path: Path, *, vocab_size: int, tokenizer: str = "", corpus: str = "") -> Iterator[ShardWriter]:
    """Opens a shard for writing; the file appears at `path` only when the block ends without an error.

    Args:
        path: where the shard appears.
        vocab_size: every id must be below this.
        tokenizer: fingerprint of the tokenizer.
        corpus: fingerprint of the corpus.

    Raises:
        DataError: an id outside the vocabulary, no tokens, or a disk that cannot be written.
    """
    with replacing(path, CACHE_REMEDY) as file:
        writer = ShardWriter(file, path, vocab_size, tokenizer, corpus)
        yield writer
        writer.finish()


def write_shard(path: Path, documents: Iterable[Ids], *, vocab_size: int, tokenizer: str = "", corpus: str = "") -> None:
    """Writes a shard of these documents; see `shard_writer`."""
    with shard_writer(path, vocab_size=vocab_size, tokenizer=tokenizer, corpus=corpus) as writer:
        for ids in documents:
            writer.add(ids)
