"""What a tokenizer offers, its configuration, and the tokenizer with one token per byte of UTF-8."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, Self

import numpy as np

from twoaxis.core.config import Config
from twoaxis.core.errors import DataError
from twoaxis.core.files import CachePath
from twoaxis.core.text import encode_text
from twoaxis.data.corpus import Corpus

Progress = Callable[[str, int, int], None]
"""Called with the name of a stage, the work done, and all of its work: in the preparation of data, bytes of text."""


class Tokenizer(ABC):
    """Encodes text as token ids and decodes them.

    Attributes:
        vocab_size: ids are from 0 to vocab_size - 1.
        end_of_document: the id at the end of every document in a shard; None without an end marker.
        begin_of_document: the ids at the beginning of every document in a shard; empty for most tokenizers.
    """

    vocab_size: int
    end_of_document: int | None
    begin_of_document: tuple[int, ...] = ()

    @property
    @abstractmethod
    def definition(self) -> str:
        """The whole tokenizer as JSON text for `load_tokenizer`."""

    @abstractmethod
    def encode_array(self, text: str) -> np.ndarray:
        """Encodes text as an array of token ids; text that spells a special token is ordinary text.

        Raises:
            DataError: half of a surrogate pair, which is not Unicode text.
        """

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Decodes ids; bytes that are not UTF-8 become U+FFFD, special tokens are left out.

        Raises:
            DataError: an id outside the vocabulary.
        """

    def spelling(self, token: int) -> str:
        """The token as its vocabulary spells it, also where it is no text."""
        return f"<{token}>"

    def encode(self, text: str) -> list[int]:
        """Encodes text as a list of token ids, without begin and end markers."""
        return self.encode_array(text).tolist()

    def encode_special(self, text: str) -> list[int]:
        """Encodes text in which the name of a special token is that token."""
        return self.encode(text)

    def special_names_in(self, text: str) -> list[str]:
        """The names of special tokens that occur in a text."""
        return [name for name in self.special_tokens if name in text]

    def prompt(self, text: str, parse_special: bool = False) -> list[int]:
        """Encodes a text to be continued, as the beginning of a document; an empty text is `before_text`.

        With `parse_special` the name of a special token is that token.
        """
        tokens, begin = self.encode_special(text) if parse_special else self.encode(text), list(self.begin_of_document)
        # A text that spells the begin marker has it once.
        return tokens if begin and tokens[: len(begin)] == begin else [*begin, *tokens] or self.before_text

    @property
    def before_text(self) -> list[int]:
        """The tokens before the text of a document: its begin marker, else the end marker of the document before, if any."""
        end = [] if self.end_of_document is None else [self.end_of_document]
        return list(self.begin_of_document) or end

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """The ids of special tokens by name: `decode` leaves them out, and `encode` never returns them."""
        return {}

    @property
    def is_lossless(self) -> bool:
        """Whether the definition guarantees that decoding restores every text; otherwise losses are measured."""
        return False

    @property
    def fingerprint(self) -> str:
        """The SHA-256 of the definition: equal fingerprints encode equally."""
        return hashlib.sha256(self.definition.encode()).hexdigest()

    def _check_ids(self, ids: Sequence[int]) -> None:
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise DataError(
                    f"token id {token}: must be from 0 to {self.vocab_size - 1}; decode with the tokenizer that made the ids"
                )


class TokenizerConfig(Config, ABC):
    """Base of tokenizer configurations; `kind` names the row of the table `TOKENIZERS`."""

    def in_run_folder(self, folder: Path) -> Self:
        """Returns the configuration with paths resolved in a run folder."""
        del folder
        return self

    def remark(self, built: Tokenizer) -> str:
        """A note about the tokenizer for the user, in one line; by default none."""
        del built
        return ""

    @abstractmethod
    def build(self, corpus: Corpus, cache: CachePath = None, progress: Progress | None = None) -> Tokenizer:
        """Builds the tokenizer; one that needs training is trained on the training side of the corpus."""


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
