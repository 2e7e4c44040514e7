"""What one pass over the documents of a corpus finds: its hash and its sizes."""

import hashlib
from typing import NamedTuple

from twoaxis.core.errors import DataError


class Document(NamedTuple):
    """One text with a name that does not change between runs."""

    name: str
    text: str


class Scan(NamedTuple):
    """What one pass over the documents found.

    Attributes:
        sha256: over all names and texts in order.
        n_documents: documents with text.
        text_bytes: bytes of all texts in UTF-8.
        smallest: the smallest content key of a document.
        largest: the largest content key of a document.
    """

    sha256: str
    n_documents: int
    text_bytes: int
    smallest: int
    largest: int


class Scanner:
    """Adds up documents, one after the other; documents without text do not count."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._n_documents, self._text_bytes = 0, 0
        self._smallest, self._largest = 1 << 64, -1

    def add(self, document: Document) -> None:
        """Counts one document.

        Raises:
            DataError: half of a surrogate pair, which is not Unicode text.
        """
        try:
            name, text = document.name.encode(errors="surrogateescape"), document.text.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{document.name}: character {error.start} is half of a surrogate pair; must be Unicode text; repair the escape"
            ) from None
        if not text:
            return
        # Lengths keep the hash from depending on where one document ends and the next begins.
        self._digest.update(b"%d %d " % (len(name), len(text)) + name)
        self._digest.update(text)
        key = content_key(text)
        self._n_documents += 1
        self._text_bytes += len(text)
        self._smallest, self._largest = min(self._smallest, key), max(self._largest, key)

    def scan(self) -> Scan:
        """Returns what was found so far."""
        return Scan(self._digest.hexdigest(), self._n_documents, self._text_bytes, self._smallest, self._largest)


def content_key(text: bytes) -> int:
    """A number from 0 to 2**64 - 1 that depends on the text only and is spread evenly.

    Example:
        >>> content_key(b"one") != content_key(b"two")
        True
    """
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big")
