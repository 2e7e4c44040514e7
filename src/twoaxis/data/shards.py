"""Reading token shards through the memory map of the system."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from twoaxis.core.errors import DataError
from twoaxis.data.shard_format import HEADER_BYTES, ShardHeader, read_header

_CHUNK_TOKENS = 1 << 22


@dataclass(frozen=True, eq=False)
class TokenShard:
    """The tokens of many documents, one after the other, read from disk as they are needed.

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
    def open(cls, path: Path, check: Literal["everything", "header"] = "everything") -> "TokenShard":
        """Opens a shard.

        Args:
            path: the file.
            check: `everything` reads the file once and compares its checksum; `header` is instant.

        Raises:
            DataError: no such file, another kind of file, another version, or a file that is damaged or cut short.
        """
        try:
            with open(path, "rb") as file:
                header = read_header(file.read(HEADER_BYTES), str(path))
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror or error}); prepare the data again") from None
        size = path.stat().st_size
        if size != header.file_bytes:
            raise DataError(
                f"{path}: has {size} bytes; must have {header.file_bytes} for {header.n_tokens} tokens; "
                "delete the file and prepare the data again"
            )
        dtype = np.dtype(header.dtype).newbyteorder("<")
        tokens = np.memmap(path, dtype, mode="r", offset=HEADER_BYTES, shape=(header.n_tokens,))
        starts = np.memmap(path, "<u8", mode="r", offset=header.starts_offset, shape=(header.n_documents,))
        shard = cls(path, header, tokens, starts)
        if check == "everything":
            shard.verify()
        return shard

    @property
    def fingerprint(self) -> str:
        """The sha256 that names the shard, content and origin."""
        return self.header.fingerprint

    def __len__(self) -> int:
        return self.header.n_tokens

    def verify(self) -> None:
        """Reads the whole shard and compares it with its header.

        Raises:
            DataError: the checksum differs, an id is outside the vocabulary, or the documents are not in order.
        """
        digest = hashlib.sha256()
        with open(self.path, "rb") as file:
            file.seek(HEADER_BYTES)
            while chunk := file.read(1 << 22):
                digest.update(chunk)
        remedy = "delete the file and prepare the data again"
        if digest.hexdigest() != self.header.sha256:
            raise DataError(
                f"{self.path}: is damaged: sha256 {digest.hexdigest()[:16]} must be {self.header.sha256[:16]}; {remedy}"
            )
        for begin in range(0, len(self), _CHUNK_TOKENS):
            highest = int(self.tokens[begin : begin + _CHUNK_TOKENS].max())
            if highest >= self.header.vocab_size:
                raise DataError(f"{self.path}: holds token id {highest}; must be below {self.header.vocab_size}; {remedy}")
        starts = self.starts.astype(np.int64)
        if starts[0] != 0 or starts[-1] >= len(self) or (np.diff(starts) <= 0).any():
            raise DataError(f"{self.path}: its document starts must increase from 0 to below {len(self)}; {remedy}")

    def window(self, start: int, stop: int) -> np.ndarray:
        """Copies the tokens from `start` to before `stop` as 64-bit integers."""
        return self.tokens[start:stop].astype(np.int64)

    def document_numbers(self, positions: np.ndarray) -> np.ndarray:
        """Numbers the documents, from 0 at the beginning of the shard, that hold these positions."""
        return np.searchsorted(self.starts, positions.astype(np.uint64), side="right") - 1
