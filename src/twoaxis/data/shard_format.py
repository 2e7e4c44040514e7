"""The file format of token shards.

A shard is a header of `HEADER_BYTES`, the tokens, zeros up to a multiple of 8 bytes, and the document starts as
64-bit integers; everything is little-endian. The header is a magic number, the format version, the sha256 of what
follows in the header, a JSON text, and zeros.
"""

import hashlib
import json
import struct
from dataclasses import asdict, dataclass

import numpy as np

from twoaxis.core.errors import DataError

MAGIC = b"2AXTOKEN"
VERSION = 1
HEADER_BYTES = 4096
_PREFIX = struct.Struct("<8sI32s")


@dataclass(frozen=True)
class ShardHeader:
    """What a shard says about itself.

    Attributes:
        dtype: `uint16` for at most 65536 tokens in the vocabulary, else `uint32`.
        vocab_size: every id is below this.
        n_tokens: tokens in the shard.
        n_documents: documents in the shard, each with at least one token.
        text_bytes: bytes of the encoded text in UTF-8.
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
        """Where the document starts begin, in bytes."""
        token_bytes = self.n_tokens * np.dtype(self.dtype).itemsize
        return HEADER_BYTES + token_bytes + padding(token_bytes)

    @property
    def file_bytes(self) -> int:
        """The size of the whole file."""
        return self.starts_offset + 8 * self.n_documents

    @property
    def fingerprint(self) -> str:
        """The sha256 of the header, which holds the sha256 of the rest: it names the shard."""
        return hashlib.sha256(self._json()).hexdigest()

    def pack(self) -> bytes:
        """Returns the header as it stands at the beginning of the file."""
        body = self._json().ljust(HEADER_BYTES - _PREFIX.size, b"\0")
        return _PREFIX.pack(MAGIC, VERSION, hashlib.sha256(body).digest()) + body

    def _json(self) -> bytes:
        return json.dumps(asdict(self), sort_keys=True).encode()


def read_header(content: bytes, where: str) -> ShardHeader:
    """Reads the header from the first `HEADER_BYTES` of a file.

    Raises:
        DataError: another kind of file, another version, a damaged header, or a dtype that cannot hold the vocabulary.
    """
    remedy = "delete the file and prepare the data again"
    if len(content) < HEADER_BYTES or content[: len(MAGIC)] != MAGIC:
        raise DataError(f"{where}: is not a token shard (it begins with {content[:8]!r}); must begin with {MAGIC!r}; {remedy}")
    _, version, digest = _PREFIX.unpack_from(content)
    if version != VERSION:
        raise DataError(f"{where}: has format version {version}; must be {VERSION}; {remedy}")
    body = content[_PREFIX.size : HEADER_BYTES]
    if hashlib.sha256(body).digest() != digest:
        raise DataError(f"{where}: has a damaged header: its sha256 must be the stored one; {remedy}")
    header = ShardHeader(**json.loads(body.rstrip(b"\0")))
    dtype = token_dtype(header.vocab_size)
    if header.dtype != dtype:
        raise DataError(f"{where}: has dtype {header.dtype}; must be {dtype} for vocab_size {header.vocab_size}; {remedy}")
    return header


def token_dtype(vocab_size: int) -> str:
    """The smallest type that holds every id of the vocabulary.

    Example:
        >>> token_dtype(65536), token_dtype(65537)
        ('uint16', 'uint32')
    """
    if not 1 <= vocab_size <= 1 << 32:
        raise DataError(f"vocab_size={vocab_size}: must be from 1 to {1 << 32}; correct the tokenizer")
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def padding(token_bytes: int) -> int:
    """Zero bytes after the tokens, so that the document starts are aligned."""
    return -token_bytes % 8
