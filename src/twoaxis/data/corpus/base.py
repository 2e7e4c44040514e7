"""A corpus: named documents of text in a fixed order, with a hash, and with a fixed division into training and validation."""

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator

from twoaxis.core.config import Config
from twoaxis.core.errors import ConfigError, DataError, problem
from twoaxis.core.text import encode_text


def expanded(path: Path) -> Path:
    """The path with `~` or `~user` replaced by a home folder; unchanged if there is none."""
    return Path(os.path.expanduser(path))


def _recordable(path: Path) -> Path:
    # Not the whole path, as in `check_utf8`: a run may be loaded in any working directory.
    try:
        str(path).encode()
    except UnicodeEncodeError:
        shown = os.fsencode(path).decode(errors="backslashreplace")
        allowed = "a name in UTF-8, since the run records it as text"
        raise ConfigError(problem("path", shown, allowed, "rename it, or name a link to it")) from None
    return path


RecordedPath = Annotated[Path, AfterValidator(_recordable)]
"""The type of a configuration field that holds a path; a run records it as text."""


class Document(NamedTuple):
    """One text, with a name that is the same in every run."""

    name: str
    text: str


class Scan(NamedTuple):
    """The hash and sizes of a corpus.

    Attributes:
        sha256: of all names and texts in order.
        n_documents: documents with text.
        text_bytes: of all texts in UTF-8.
        smallest: the smallest content key of a document.
        largest: the largest content key of a document.
    """

    sha256: str
    n_documents: int
    text_bytes: int
    smallest: int
    largest: int


class Scanner:
    """Computes a `Scan` document by document; documents without text are skipped."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._n_documents, self._text_bytes = 0, 0
        self._smallest, self._largest = 1 << 64, -1

    def add(self, document: Document) -> None:
        """Adds one document.

        Raises:
            DataError: half of a surrogate pair, which is not Unicode text.
        """
        text = encode_text(document.text, document.name, "repair the escape")
        if not text:
            return
        name = document.name.encode(errors="surrogateescape")
        # With the lengths, the hash depends on where documents begin and end.
        self._digest.update(b"%d %d " % (len(name), len(text)) + name)
        self._digest.update(text)
        key = content_key(text)
        self._n_documents += 1
        self._text_bytes += len(text)
        self._smallest, self._largest = min(self._smallest, key), max(self._largest, key)

    def scan(self) -> Scan:
        """Returns the scan of the documents so far."""
        return Scan(self._digest.hexdigest(), self._n_documents, self._text_bytes, self._smallest, self._largest)


def content_key(text: bytes) -> int:
    """A uniform hash of the text, from 0 to 2**64 - 1.

    Example:
        >>> content_key(b"one") != content_key(b"two")
        True
    """
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big")


Side = Literal["train", "validation"]


class Split(NamedTuple):
    """A division of documents.

    Attributes:
        rule: its full description, which is a part of the fingerprint of the corpus.
        divide: yields the parts of one document, each with its side.
    """

    rule: str
    divide: Callable[[Document], Iterator[tuple[Side, Document]]]


def split_documents(rule: str, is_validation: Callable[[Document], bool]) -> Split:
    """Puts each document on one side."""

    def divide(document: Document) -> Iterator[tuple[Side, Document]]:
        yield "validation" if is_validation(document) else "train", document

    return Split(f"validation: {rule}", divide)


def split_by_content(threshold: int) -> Split:
    """Validates on documents whose content key is below the threshold; equal texts are on the same side."""
    rule = f"content key below {threshold}"
    return split_documents(rule, lambda document: content_key(document.text.encode()) < threshold)


def split_tail(fraction: float) -> Split:
    """Validates on the end of every document, for a corpus with a single text; each side has at least one character."""

    def divide(document: Document) -> Iterator[tuple[Side, Document]]:
        cut = len(document.text) - round(len(document.text) * fraction)
        cut = max(1, min(cut, len(document.text) - 1))
        yield "train", document._replace(text=document.text[:cut])
        yield "validation", document._replace(text=document.text[cut:])

    return Split(f"validation: last {fraction!r} of the text", divide)


def split_by_fraction(scan: Scan, fraction: float, name: str) -> Split:
    """Divides a corpus so that about this fraction of it is validation and neither side is empty.

    A single document is cut near its end. Several are divided by content, so that added documents move no other and a repeated
    document is never on both sides.

    Raises:
        DataError: a single character, or only copies of one document.
    """
    if scan.n_documents == 1:
        if scan.text_bytes < 2:
            raise DataError(f"corpus {name!r} holds 1 byte: must hold at least 2 to be divided; use a longer text")
        return split_tail(fraction)
    if scan.smallest == scan.largest:
        raise DataError(
            f"corpus {name!r} holds {scan.n_documents} copies of one document: must hold at least 2 different ones "
            "to keep validation apart from training; remove the copies"
        )
    threshold = int(fraction * 2**64)
    return split_by_content(max(scan.smallest + 1, min(threshold, scan.largest)))


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
