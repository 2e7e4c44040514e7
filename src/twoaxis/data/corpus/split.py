"""How a corpus is divided into training and validation: always the same way for the same documents."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from twoaxis.core.errors import DataError
from twoaxis.data.corpus.scan import Document, Scan, content_key

Side = Literal["train", "validation"]
"""The two sides of a division."""


class Split(ABC):
    """A division of documents; `rule` describes it in full, since it becomes part of the corpus fingerprint."""

    @property
    @abstractmethod
    def rule(self) -> str:
        """The division in words and numbers."""

    @abstractmethod
    def divide(self, document: Document) -> Iterator[tuple[Side, Document]]:
        """Yields the parts of one document and the side each belongs to."""


@dataclass(frozen=True)
class ContentSplit(Split):
    """Documents whose content key is below the threshold are validation; equal texts are always on one side."""

    threshold: int

    @property
    def rule(self) -> str:
        """The division in words and numbers."""
        return f"validation: content key below {self.threshold}"

    def divide(self, document: Document) -> Iterator[tuple[Side, Document]]:
        """Yields the whole document with its side."""
        yield "validation" if content_key(document.text.encode()) < self.threshold else "train", document


@dataclass(frozen=True)
class TailSplit(Split):
    """The last part of every document is validation; for a corpus that is one text."""

    fraction: float

    @property
    def rule(self) -> str:
        """The division in words and numbers."""
        return f"validation: last {self.fraction!r} of the text"

    def divide(self, document: Document) -> Iterator[tuple[Side, Document]]:
        """Yields the beginning for training and the end for validation, each with at least one character."""
        cut = len(document.text) - round(len(document.text) * self.fraction)
        cut = max(1, min(cut, len(document.text) - 1))
        yield "train", document._replace(text=document.text[:cut])
        yield "validation", document._replace(text=document.text[cut:])


def split_by_fraction(scan: Scan, fraction: float, name: str) -> Split:
    """Divides a corpus so that about this fraction of it is validation and neither side is empty.

    One document is cut near its end. Several are divided by their content, so that adding documents moves
    none of the others and a repeated document is never on both sides.

    Raises:
        DataError: a single character, or many copies of one document, which cannot be divided.
    """
    if scan.n_documents == 1:
        if scan.text_bytes < 2:
            raise DataError(f"corpus {name!r} holds 1 byte: must hold at least 2 to be divided; use a longer text")
        return TailSplit(fraction)
    if scan.smallest == scan.largest:
        raise DataError(
            f"corpus {name!r} holds {scan.n_documents} copies of one document: must hold at least 2 different ones "
            "to keep validation apart from training; remove the copies"
        )
    threshold = int(fraction * 2**64)
    return ContentSplit(max(scan.smallest + 1, min(threshold, scan.largest)))
