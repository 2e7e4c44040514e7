"""The hash and sizes of a corpus, from one pass over its documents."""

import hashlib
from typing import NamedTuple

from twoaxis.core.text import encode_text


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
