"""Token shards: the file format, an atomic writer, and a memory-mapped reader."""

import hashlib
import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from twoaxis.core.errors import DataError
from twoaxis.core.files import CACHE_REMEDY, replacing

MAGIC = b"2AXTOKEN"
VERSION = 1
HEADER_BYTES = 4096
REMEDY = "delete the file and prepare the data again"
_PREFIX = struct.Struct("<8sI32s")
_CHUNK = 1 << 22


@dataclass(frozen=True)
class ShardHeader:
    """The header of a shard.

    Attributes:
        dtype: `uint16` for a vocabulary of at most 65536 tokens, else `uint32`.
        vocab_size: every id is below this.
        n_tokens: tokens in the shard.
        n_documents: documents in the shard, each with at least one token.
        text_bytes: of the encoded text in UTF-8.
        tokenizer: fingerprint of the tokenizer, or "".
        corpus: fingerprint of the corpus, or "".
        sha256: of everything after the header.
    """

    dtype: str
    vocab_size: int
    n_tokens: int
    n_documents: int
    text_bytes: int
    tokenizer: str
    corpus: str
    sha256: str

    @property
    def starts_offset(self) -> int:
        """The offset of the document starts, in bytes."""
        token_bytes = self.n_tokens * np.dtype(self.dtype).itemsize
        return HEADER_BYTES + token_bytes + padding(token_bytes)

    @property
    def file_bytes(self) -> int:
        """The size of the whole file."""
        return self.starts_offset + 8 * self.n_documents

    @property
    def fingerprint(self) -> str:
        """The SHA-256 of the header, which includes that of the rest: identifies the shard."""
        return hashlib.sha256(self._json()).hexdigest()

    def pack(self) -> bytes:
        """The bytes of the header."""
        body = self._json().ljust(HEADER_BYTES - _PREFIX.size, b"\0")
        return _PREFIX.pack(MAGIC, VERSION, hashlib.sha256(body).digest()) + body

    def _json(self) -> bytes:
        return json.dumps(asdict(self), sort_keys=True).encode()


def read_header(content: bytes, where: str) -> ShardHeader:
    """Reads the header from the first `HEADER_BYTES` of a file.

    Raises:
        DataError: another kind of file, another version, a damaged header, or a wrong dtype for the vocabulary.
    """
    if content[: len(MAGIC)] != MAGIC:
        raise DataError(f"{where}: is not a token shard (it begins with {content[:8]!r}); must begin with {MAGIC!r}; {REMEDY}")
    if len(content) < HEADER_BYTES:
        raise DataError(f"{where}: has {len(content)} bytes; must have at least the {HEADER_BYTES} of its header; {REMEDY}")
    _, version, digest = _PREFIX.unpack_from(content)
    if version != VERSION:
        raise DataError(f"{where}: has format version {version}; must be {VERSION}; {REMEDY}")
    body = content[_PREFIX.size : HEADER_BYTES]
    if hashlib.sha256(body).digest() != digest:
        raise DataError(f"{where}: has a damaged header: its sha256 must be the stored one; {REMEDY}")
    header = ShardHeader(**json.loads(body.rstrip(b"\0")))
    dtype = token_dtype(header.vocab_size)
    if header.dtype != dtype:
        raise DataError(f"{where}: has dtype {header.dtype}; must be {dtype} for vocab_size {header.vocab_size}; {REMEDY}")
    return header


def token_dtype(vocab_size: int) -> str:
    """The smallest dtype for every id of the vocabulary.

    Example:
        >>> token_dtype(65536), token_dtype(65537)
        ('uint16', 'uint32')
    """
    if not 1 <= vocab_size <= 1 << 32:
        raise DataError(f"vocab_size={vocab_size}: must be from 1 to {1 << 32}; correct the tokenizer")
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def padding(token_bytes: int) -> int:
    """Zero bytes after the tokens that align the document starts."""
    return -token_bytes % 8


Ids = Sequence[int] | np.ndarray


class ShardWriter:
    """Writes documents to a shard; opened by `shard_writer`."""

    def __init__(self, file: BinaryIO, path: Path, vocab_size: int, tokenizer: str, corpus: str) -> None:
        self._file, self._path = file, path
        self._dtype = token_dtype(vocab_size)
        self._vocab_size, self._tokenizer, self._corpus = vocab_size, tokenizer, corpus
        self._digest = hashlib.sha256()
        self._starts: list[int] = []
        self._n_tokens = self._text_bytes = 0
        file.write(bytes(HEADER_BYTES))

    def add(self, ids: Ids, text_bytes: int = 0, name: str = "") -> None:
        """Appends one document, `name` in errors; a document without tokens is skipped.

        Raises:
            DataError: an id outside the vocabulary, or several rows of ids.
        """
        tokens, called = np.asarray(ids), f"document {name or len(self._starts)}"
        if not tokens.size:
            return
        if tokens.ndim != 1:
            raise DataError(f"{called}: has ids of shape {list(tokens.shape)}; must be one row; add each row as a document")
        low, high = int(tokens.min()), int(tokens.max())
        if tokens.dtype.kind not in "iu" or low < 0 or high >= self._vocab_size:
            wrong = low if low < 0 else high
            raise DataError(
                f"token id {wrong} in {called}: must be an integer from 0 to "
                f"{self._vocab_size - 1}; use the vocab_size of the tokenizer that made the ids"
            )
        self._starts.append(self._n_tokens)
        self._n_tokens += tokens.size
        self._text_bytes += text_bytes
        self._write(tokens.astype(np.dtype(self._dtype).newbyteorder("<")).tobytes())

    def finish(self) -> None:
        """Writes the document starts, then the header.

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
    """Opens a shard for writing; the file appears at `path` when the block ends without an error.

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


@dataclass(frozen=True, eq=False)
class TokenShard:
    """The tokens of concatenated documents, read from disk on demand.

    Attributes:
        path: the file.
        header: its sizes, vocabulary and fingerprints.
        tokens: [n_tokens] memory map of the ids.
        starts: [n_documents] memory map of the first position of each document, increasing from 0.
    """

    path: Path
    header: ShardHeader
    tokens: np.ndarray
    starts: np.ndarray

    @classmethod
    def open(cls, path: Path) -> "TokenShard":
        """Opens a shard, and reads it once to verify its checksum.

        Raises:
            DataError: no such file, another kind of file, another version, or a damaged file.
        """
        try:
            with open(path, "rb") as file:
                header = read_header(file.read(HEADER_BYTES), str(path))
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror or error}); prepare the data again") from None
        size = path.stat().st_size
        if size != header.file_bytes:
            must = f"must have {header.file_bytes} for {header.n_tokens} tokens"
            raise DataError(f"{path}: has {size} bytes; {must}; {REMEDY}")
        dtype = np.dtype(header.dtype).newbyteorder("<")
        tokens = np.memmap(path, dtype, mode="r", offset=HEADER_BYTES, shape=(header.n_tokens,))
        starts = np.memmap(path, "<u8", mode="r", offset=header.starts_offset, shape=(header.n_documents,))
        shard = cls(path, header, tokens, starts)
        shard.verify()
        return shard

    @property
    def fingerprint(self) -> str:
        """The SHA-256 of content and origin."""
        return self.header.fingerprint

    def __len__(self) -> int:
        return self.header.n_tokens

    def verify(self) -> None:
        """Reads the whole shard and compares it with its header.

        Raises:
            DataError: the checksum differs, an id is outside the vocabulary, or the documents are not in order.
        """
        with open(self.path, "rb") as file:
            file.seek(HEADER_BYTES)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != self.header.sha256:
            raise DataError(f"{self.path}: is damaged: sha256 {digest[:16]} must be {self.header.sha256[:16]}; {REMEDY}")
        for begin in range(0, len(self), _CHUNK):
            highest = int(self.tokens[begin : begin + _CHUNK].max())
            if highest >= self.header.vocab_size:
                raise DataError(f"{self.path}: holds token id {highest}; must be below {self.header.vocab_size}; {REMEDY}")
        starts = self.starts.astype(np.int64)
        if starts[0] != 0 or starts[-1] >= len(self) or (np.diff(starts) <= 0).any():
            raise DataError(f"{self.path}: its document starts must increase from 0 to below {len(self)}; {REMEDY}")

    def window(self, start: int, stop: int) -> np.ndarray:
        """The tokens `start:stop` as 64-bit integers."""
        return self.tokens[start:stop].astype(np.int64)

    def document_numbers(self, positions: np.ndarray) -> np.ndarray:
        """The documents of these positions, numbered from 0 in the shard."""
        return np.searchsorted(self.starts, positions.astype(np.uint64), side="right") - 1
