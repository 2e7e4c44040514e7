"""A corpus: named documents of text in a fixed order, with a fixed division into training and validation."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from twoaxis.core.config import Config
from twoaxis.core.errors import DataError
from twoaxis.data.corpus.split import Document, Scan, Scanner, Side, Split


class Source(NamedTuple):
    """The name of a corpus in a run folder, and its version ("" if it has none but its content)."""

    name: str
    version: str = ""


class CorpusConfig(Config, ABC):
    """Base of corpus configurations; `kind` names the row of the table `CORPORA`."""

    @property
    @abstractmethod
    def source(self) -> Source:
        """The name and version of the corpus."""

    @abstractmethod
    def documents(self) -> Iterator[Document]:
        """Reads the documents, in the same order at every call; empty documents may be left out.

        Raises:
            DataError: a file is missing, of another kind, or has no text where it must.
        """

    @abstractmethod
    def split(self, scan: Scan) -> Split:
        """Returns the division into training and validation."""

    @property
    def answer_cues(self) -> str:
        """The characters after which the next token counts in the loss; "" when every token counts."""
        return ""

    def check_windows(self, seq_len: int) -> None:
        """Refuses a window length that does not fit the corpus; by default none."""
        del seq_len

    def check(self, scan: Scan) -> None:
        """Refuses unexpected content; by default none."""
        del scan


@dataclass(frozen=True)
class Corpus:
    """A corpus that has been read once for its hash, sizes and division."""

    config: CorpusConfig
    source: Source
    scan: Scan
    division: Split

    @classmethod
    def open(cls, config: CorpusConfig) -> "Corpus":
        """Reads the corpus once.

        Raises:
            DataError: it cannot be read, is empty, not the expected one, or too small to divide.
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
        """The SHA-256 of the documents and their division; identifies the training data."""
        return hashlib.sha256(f"{self.scan.sha256} {self.division.rule}".encode()).hexdigest()

    def documents(self, side: Side) -> Iterator[Document]:
        """Reads the documents of one side of the division, in corpus order.

        Raises:
            DataError: at the end, if the corpus has changed since it was opened.
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
        """The record of the corpus in a run folder, as JSON-ready data."""
        return {
            "name": self.source.name,
            "version": self.source.version,
            "sha256": self.scan.sha256,
            "documents": self.scan.n_documents,
            "text_bytes": self.scan.text_bytes,
            "split": self.division.rule,
            "fingerprint": self.fingerprint,
        }
