"""A corpus: named documents of text in a fixed order, with a fixed division into training and validation."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from twoaxis.core.config import Config
from twoaxis.core.errors import DataError
from twoaxis.data.corpus.scan import Document, Scan, Scanner
from twoaxis.data.corpus.split import Side, Split


class Source(NamedTuple):
    """What a corpus calls itself in a run folder: its name and its version ("" when the content is the only version)."""

    name: str
    version: str = ""


class CorpusConfig(Config, ABC):
    """Base of every kind of corpus; its `kind` names the row of the table `CORPORA`."""

    @property
    @abstractmethod
    def source(self) -> Source:
        """The name and version of the corpus."""

    @abstractmethod
    def documents(self) -> Iterator[Document]:
        """Reads the documents, in the same order at every call; documents without text may be left out.

        Raises:
            DataError: a file is missing, is not of this kind, or holds no text where it should.
        """

    @abstractmethod
    def split(self, scan: Scan) -> Split:
        """Chooses how the corpus is divided, given what one pass over it found."""

    @property
    def answer_cues(self) -> str:
        """The characters after which the next token counts in the loss; "" when every token counts."""
        return ""

    def check_windows(self, seq_len: int) -> None:
        """Refuses windows of a length that the corpus cannot be read in; by default every length will do."""
        del seq_len

    def check(self, scan: Scan) -> None:
        """Refuses a corpus that is not the one this configuration promises; by default every corpus will do."""
        del scan


@dataclass(frozen=True)
class Corpus:
    """A corpus that has been read once, so that its hash, its size and its division are known.

    Attributes:
        config: where the documents come from.
        source: its name and version.
        scan: its hash and sizes.
        division: how it is divided into training and validation.
    """

    config: CorpusConfig
    source: Source
    scan: Scan
    division: Split

    @classmethod
    def open(cls, config: CorpusConfig) -> "Corpus":
        """Reads the corpus once.

        Raises:
            DataError: it cannot be read, holds no text, is not the expected one, or is too small to divide.
        """
        scanner = Scanner()
        for document in config.documents():
            scanner.add(document)
        scan = scanner.scan()
        if not scan.n_documents:
            raise DataError(f"corpus {config.source.name!r} is empty: must hold some text; choose another path or corpus")
        config.check(scan)
        return cls(config, config.source, scan, config.split(scan))

    @property
    def fingerprint(self) -> str:
        """The sha256 of the documents together with their division: it names what was trained on."""
        return hashlib.sha256(f"{self.scan.sha256} {self.division.rule}".encode()).hexdigest()

    def documents(self, side: Side) -> Iterator[Document]:
        """Reads the documents of one side of the division, in corpus order.

        Raises:
            DataError: at the end, if the corpus is no longer what it was when it was opened.
        """
        scanner = Scanner()
        for document in self.config.documents():
            scanner.add(document)
            for part_side, part in self.division.divide(document):
                if part_side == side and part.text:
                    yield part
        if scanner.scan() != self.scan:
            raise DataError(f"corpus {self.source.name!r} changed while it was read; wait until it is complete, then run again")

    def to_data(self) -> dict[str, Any]:
        """Returns what a run folder records about the corpus, as plain JSON-ready data."""
        return {
            "name": self.source.name,
            "version": self.source.version,
            "sha256": self.scan.sha256,
            "documents": self.scan.n_documents,
            "text_bytes": self.scan.text_bytes,
            "split": self.division.rule,
            "fingerprint": self.fingerprint,
        }
