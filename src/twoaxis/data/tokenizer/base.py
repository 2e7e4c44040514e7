"""What a tokenizer offers, and the configuration it is built from."""

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

import numpy as np

from twoaxis.core.config import Config
from twoaxis.core.errors import DataError
from twoaxis.data.corpus import Corpus

Progress = Callable[[str, int, int], None]
"""Called with the stage in words, the bytes of text done, and the bytes of text in the corpus."""


class Tokenizer(ABC):
    """Turns text into token ids and back.

    Attributes:
        vocab_size: ids are from 0 to vocab_size - 1.
        end_of_document: the id that ends every document in a shard, or None when documents have no end marker.
        begin_of_document: the ids that begin every document in a shard; none for most tokenizers.
    """

    vocab_size: int
    end_of_document: int | None
    begin_of_document: tuple[int, ...] = ()

    @property
    @abstractmethod
    def definition(self) -> str:
        """All of the tokenizer as JSON text that `load_tokenizer` reads back."""

    @abstractmethod
    def encode_array(self, text: str) -> np.ndarray:
        """Encodes text as an array of token ids; text that spells an end marker is ordinary text.

        Raises:
            DataError: half of a surrogate pair, which is not Unicode text.
        """

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Decodes ids; bytes that are not UTF-8 become U+FFFD, and end markers become nothing.

        Raises:
            DataError: an id outside the vocabulary.
        """

    def encode(self, text: str) -> list[int]:
        """Encodes text as a list of token ids, without a begin or an end marker."""
        return self.encode_array(text).tolist()

    def encode_special(self, text: str) -> list[int]:
        """Encodes text in which the name of a special token stands for that token; there are none here by default."""
        return self.encode(text)

    def spelled(self, text: str) -> list[str]:
        """The names of special tokens that occur in a text, as they do where it was written for `encode_special`."""
        return [name for name in self.special_tokens if name in text]

    def prompt(self, text: str, parse_special: bool = False) -> list[int]:
        """Encodes a text that a model is to continue: as the beginning of a document; no text is the end of the one before.

        Args:
            text: the text.
            parse_special: whether the name of a special token stands for that token, in place of its letters.
        """
        tokens, begin = self.encode_special(text) if parse_special else self.encode(text), list(self.begin_of_document)
        # A text that spells its beginning has it once.
        return tokens if begin and tokens[: len(begin)] == begin else [*begin, *tokens] or self.before_text

    @property
    def before_text(self) -> list[int]:
        """What the text of a document follows: its begin marker, else the end marker of the document before, else nothing."""
        end = [] if self.end_of_document is None else [self.end_of_document]
        return list(self.begin_of_document) or end

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """The ids of tokens that are no text, by their names: decoding leaves them out, and encoding never makes them."""
        return {}

    @property
    def fingerprint(self) -> str:
        """The sha256 of the definition: equal fingerprints encode equally."""
        return hashlib.sha256(self.definition.encode()).hexdigest()

    def _check_ids(self, ids: Sequence[int]) -> None:
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise DataError(
                    f"token id {token}: must be from 0 to {self.vocab_size - 1}; decode with the tokenizer that made the ids"
                )


class TokenizerConfig(Config, ABC):
    """Base of every kind of tokenizer; its `kind` names the row of the table `TOKENIZERS`."""

    def beside(self, folder: Path) -> Self:
        """The same for a run in this folder, which may hold what the tokenizer is made from."""
        del folder
        return self

    @abstractmethod
    def build(self, corpus: Corpus, cache: str | os.PathLike[str] | None = None, progress: Progress | None = None) -> Tokenizer:
        """Returns the tokenizer, trained on the training side of the corpus if it must be trained.

        Args:
            corpus: read only when a tokenizer is trained.
            cache: the cache folder; None is the default one.
            progress: called while a tokenizer is trained.
        """


def as_utf8(text: str) -> bytes:
    """Encodes text as UTF-8.

    Raises:
        DataError: half of a surrogate pair, which is not Unicode text.
    """
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"character {error.start} of the text is half of a surrogate pair; must be Unicode text; remove it"
        ) from None
