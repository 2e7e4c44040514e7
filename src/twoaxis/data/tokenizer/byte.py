"""One token per byte of UTF-8."""

import json
from collections.abc import Sequence
from typing import Literal

import numpy as np

from twoaxis.core.folders import CachePath
from twoaxis.core.text import encode_text
from twoaxis.data.corpus import Corpus
from twoaxis.data.tokenizer.base import Progress, Tokenizer, TokenizerConfig


class ByteTokenizer(Tokenizer):
    """256 ids, one per byte value, and no end marker, so the loss per token is the loss per byte.

    Example:
        >>> ByteTokenizer().encode("Hi")
        [72, 105]
    """

    vocab_size = 256
    end_of_document = None

    @property
    def definition(self) -> str:
        """The whole tokenizer as JSON text."""
        return json.dumps({"kind": "byte"})

    @property
    def is_lossless(self) -> bool:
        """True: every byte has a token."""
        return True

    def encode_array(self, text: str) -> np.ndarray:
        """Encodes text as its bytes in UTF-8."""
        return np.frombuffer(encode_text(text), dtype=np.uint8)

    def decode(self, ids: Sequence[int]) -> str:
        """Decodes bytes; bytes that are not UTF-8 become U+FFFD."""
        self._check_ids(ids)
        return bytes(ids).decode(errors="replace")


class ByteConfig(TokenizerConfig):
    """The byte tokenizer, which needs no training."""

    kind: Literal["byte"] = "byte"

    def build(self, corpus: Corpus, cache: CachePath = None, progress: Progress | None = None) -> ByteTokenizer:
        """Returns the byte tokenizer."""
        del corpus, cache, progress
        return ByteTokenizer()
