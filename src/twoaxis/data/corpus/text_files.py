"""Plain text: a file is one document, a folder one document per file."""

from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field

from twoaxis.core.errors import DataError, problem
from twoaxis.core.text import decode_text
from twoaxis.data.corpus.base import CorpusConfig, Source
from twoaxis.data.corpus.scan import Document, Scan
from twoaxis.data.corpus.split import Split, split_by_fraction


class FileCorpusConfig(CorpusConfig):
    """Base of the corpora that are files of the user.

    Attributes:
        path: a file, or a folder that is searched through for files that match `pattern`.
        pattern: which files of a folder belong to the corpus.
        validation_fraction: about which part of the documents is validation; of one single document, its tail.
    """

    path: Path
    pattern: str
    validation_fraction: float = Field(default=0.05, gt=0, lt=1)

    @property
    def source(self) -> Source:
        """The name of the file or folder."""
        return Source(self.path.expanduser().resolve().name)

    def split(self, scan: Scan) -> Split:
        """Divides by content, or by position when there is one document."""
        return split_by_fraction(scan, self.validation_fraction, self.source.name)

    def documents(self) -> Iterator[Document]:
        """Reads the files in the order of their names."""
        root = self.path.expanduser()
        for path in self._files(root):
            name = path.relative_to(root).as_posix() if root.is_dir() else path.name
            try:
                yield from self.read_file(path, name)
            except OSError as error:
                raise DataError(
                    f"{path}: cannot be read ({error.strerror or error}); check the file and its permissions"
                ) from None

    @abstractmethod
    def read_file(self, path: Path, name: str) -> Iterator[Document]:
        """Reads the documents of one file; `name` is what their names begin with."""

    def _files(self, root: Path) -> list[Path]:
        if root.is_file():
            return [root]
        if not root.is_dir():
            raise DataError(problem("path", str(self.path), "an existing file or folder", "correct the path of the corpus"))
        files = sorted((path for path in root.rglob(self.pattern) if path.is_file()), key=lambda path: path.as_posix())
        if not files:
            raise DataError(f"folder {self.path} has no file that matches {self.pattern!r}; correct the path or set pattern")
        return files


class TextConfig(FileCorpusConfig):
    """A UTF-8 text file, or a folder of them; line ends are kept as they are."""

    kind: Literal["text"] = "text"
    pattern: str = "*.txt"

    def read_file(self, path: Path, name: str) -> Iterator[Document]:
        """Reads the file as one document."""
        yield Document(name, decode_text(path.read_bytes(), str(path)))
