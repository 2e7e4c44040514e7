"""Corpora from files of the user: plain text, JSON Lines, Parquet, recognised by content."""

import json
import os
import re
from abc import abstractmethod
from codecs import BOM_UTF8
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from twoaxis.core.errors import ConfigError, DataError, nearest, problem
from twoaxis.core.text import PARQUET, decode_text, signature
from twoaxis.data.corpus.base import CorpusConfig, Document, RecordedPath, Scan, Source, Split, expanded, split_by_fraction

PATTERNS = {"text": ("*.txt",), "jsonl": ("*.jsonl", "*.ndjson"), "parquet": ("*.parquet",)}
"""Patterns of file names by kind of corpus."""

UNREADABLE = (".csv", ".tsv", ".html", ".htm", ".gz", ".bz2", ".xz", ".zst", ".zip", ".7z", ".tar")
"""Suffixes of texts in a format that no kind reads."""

_TABLES = {".csv": "a table of comma-separated values", ".tsv": "a table of tab-separated values"}
_MARKUP = re.compile(rb"(?:\xef\xbb\xbf)?\s*<(!doctype\s+html|html|\?xml)[\s>]", re.IGNORECASE)
_HEAD_BYTES, _LINES, _LINE_BYTES, _FILES = 1 << 12, 8, 1 << 24, 8
_AS_TEXT = "to train on it as it stands, set kind = 'text'"


def detect_kind(path: Path) -> dict[str, str]:
    """The `kind` of corpus of a file or folder, and the `pattern` of a folder; text if nothing is there.

    Raises:
        ConfigError: a format that no kind reads, or a folder with files of several kinds.
    """
    return _of_folder(path) if path.is_dir() else {"kind": _of_file(path)}


def _of_folder(folder: Path) -> dict[str, str]:
    suffixes = sorted({path.suffix for path in _files_below(folder, "*") if path.suffix})
    known = {pattern.removeprefix("*"): (kind, pattern) for kind, patterns in PATTERNS.items() for pattern in patterns}
    found = [suffix for suffix in suffixes if suffix.lower() in known or suffix.lower() in UNREADABLE]
    if len(found) > 1 or (found and found[0].lower() not in known):
        names = ", ".join(f"*{suffix}" for suffix in found)
        allowed = f"of one kind: {', '.join(f'*{suffix}' for suffix in known)}"
        raise ConfigError(f"folder {folder} holds {names}: must be {allowed}; name its files with kind and pattern")
    if not found:
        return {"kind": "text"}
    kind, pattern = known[found[0].lower()][0], f"*{found[0]}"
    for path in _files_below(folder, pattern)[:_FILES]:
        if (other := _of_file(path)) != kind:
            raise ConfigError(
                f"folder {folder} holds {other} in {path.name}: must be {kind}; name its files with kind and pattern"
            )
    return {"kind": kind, "pattern": pattern}


def _files_below(folder: Path, pattern: str) -> list[Path]:
    """The files that match the pattern, in order of their paths; a link to a missing file counts as one.

    Raises:
        DataError: a folder cannot be read.
        ConfigError: the pattern is none.
    """
    try:
        found = {path for place in _linked_folders(folder) for path in place.rglob(pattern) if _is_file(path)}
    except OSError as error:
        raise DataError(f"{error.filename}: cannot be read ({error.strerror}); check the folder and its permissions") from None
    except (ValueError, NotImplementedError) as error:
        allowed = f"a pattern of names within the folder ({error})"
        raise ConfigError(problem("pattern", pattern, allowed, "write it as '*.txt' or 'folder/*.txt'")) from None
    return sorted(found, key=lambda path: path.as_posix())


def _linked_folders(folder: Path) -> Iterator[Path]:
    """The folder, and the folders elsewhere that links in it name, which `rglob` does not enter."""

    def refuse(error: OSError) -> None:
        raise error

    left, entered = [folder], list[Path]()
    while left:
        real = (place := left.pop(0)).resolve()
        # A link into a folder that was read, or to one above the first, would give the same files again.
        if any(real.is_relative_to(other) for other in entered) or (entered and entered[0].is_relative_to(real)):
            continue
        entered.append(real)
        yield place
        for parent, names, _ in os.walk(place, onerror=refuse):
            left += [path for name in sorted(names) if (path := Path(parent, name)).is_symlink()]


def _is_file(path: Path) -> bool:
    return path.is_file() or (path.is_symlink() and not path.exists())


def _of_file(path: Path) -> str:
    suffix = path.suffix.lower()
    named = next((kind for kind, patterns in PATTERNS.items() if f"*{suffix}" in patterns), "text")
    try:
        head, objects = _beginning(path) if path.is_file() else (b"", False)
    except OSError:
        # Reading the corpus will raise the error.
        return named
    found = signature(head)
    if found and found[0] == PARQUET:
        return "parquet"
    if found:
        raise ConfigError(f"corpus {path}: is {found[0]}: must be text in UTF-8, JSON Lines or Parquet; {found[1]}")
    if objects or named != "text":
        return "jsonl" if objects else named
    what = "JSON, but not one object per line" if head and suffix == ".json" else _TABLES.get(suffix)
    if markup := _MARKUP.match(head):
        what = "XML" if markup[1].startswith(b"?") else "HTML"
    if what:
        raise ConfigError(f"corpus {path}: is {what}: must be text, JSON Lines or Parquet; convert it, or {_AS_TEXT}")
    return "text"


def _beginning(path: Path) -> tuple[bytes, bool]:
    """The first bytes, and whether the first lines are JSON objects."""
    with open(path, "rb") as file:
        head = file.read(_HEAD_BYTES)
        file.seek(0)
        lines = iter(lambda: file.readline(_LINE_BYTES), b"")
        first = islice((line.removeprefix(BOM_UTF8) for line in lines if line.strip()), _LINES)
        return head, head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{") and all(map(_is_object, first))


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


class FileCorpusConfig(CorpusConfig):
    """Base of the corpora from files.

    Attributes:
        path: a file, or a folder that is searched recursively, also behind links.
        pattern: matches the files of a folder.
        validation_fraction: the approximate fraction of documents in validation; of a single document, its end.
    """

    path: RecordedPath
    pattern: str
    validation_fraction: float = Field(default=0.05, gt=0, lt=1)

    @property
    def source(self) -> Source:
        """The name of the file or folder."""
        # A name that is not UTF-8, of a folder that is given as ".".
        return Source(os.fsencode(expanded(self.path).resolve().name).decode(errors="backslashreplace"))

    def split(self, scan: Scan) -> Split:
        """Divides by content, or a single document by position."""
        return split_by_fraction(scan, self.validation_fraction, self.source.name)

    def documents(self) -> Iterator[Document]:
        """Reads the files in order of their paths."""
        root = expanded(self.path)
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
        """Reads the documents of one file; their names begin with `name`."""

    def _files(self, root: Path) -> list[Path]:
        if root.is_file():
            return [root]
        if not root.is_dir():
            raise DataError(problem("path", str(self.path), "an existing file or folder", "correct the path of the corpus"))
        files = _files_below(root, self.pattern)
        if not files:
            raise DataError(f"folder {self.path} has no file that matches {self.pattern!r}; correct the path or set pattern")
        return files


class TextConfig(FileCorpusConfig):
    """A UTF-8 text file, or a folder of them; line ends are unchanged."""

    kind: Literal["text"] = "text"
    pattern: str = "*.txt"

    def read_file(self, path: Path, name: str) -> Iterator[Document]:
        """Reads the file as one document."""
        yield Document(name, decode_text(path.read_bytes(), str(path)))


class JsonlConfig(FileCorpusConfig):
    """A JSON Lines file, or a folder of them; blank lines are skipped.

    Attributes:
        field: the key of the text.
    """

    kind: Literal["jsonl"] = "jsonl"
    pattern: str = "*.jsonl"
    field: str = "text"

    def read_file(self, path: Path, name: str) -> Iterator[Document]:
        """Reads one document per line."""
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if line.removeprefix(BOM_UTF8).strip():
                    yield Document(f"{name}:{number}", self._text(line, f"{path}:{number}"))

    def _text(self, line: bytes, where: str) -> str:
        content = decode_text(line, where)
        try:
            item: Any = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: not JSON ({error}); write one JSON object per line") from None
        if not isinstance(item, dict):
            raise DataError(f"{where}: is a JSON {type(item).__name__}; must be an object with the key {self.field!r}")
        if self.field not in item:
            remedy = nearest(self.field, item) if item else "or add it"
            raise DataError(f"{where}: has no key {self.field!r}; set field, {remedy}")
        text = item[self.field]
        if not isinstance(text, str):
            got = f"{self.field!r} is {type(text).__name__}"
            raise DataError(f"{where}: {got}; must be a string; set field to the key of the text")
        return text


class ParquetConfig(FileCorpusConfig):
    """A Parquet file, or a folder of them; needs the extra `twoaxis[parquet]`.

    Attributes:
        column: the string column with the text.
    """

    kind: Literal["parquet"] = "parquet"
    pattern: str = "*.parquet"
    column: str = "text"

    def read_file(self, path: Path, name: str) -> Iterator[Document]:
        """Reads one document per row, a batch of rows at a time."""
        try:
            import pyarrow
            from pyarrow import parquet
        except ImportError:
            raise DataError(f"{path}: reading Parquet needs pyarrow; install it with: pip install 'twoaxis[parquet]'") from None
        row = 0
        try:
            with parquet.ParquetFile(path) as file:
                columns = file.schema_arrow.names
                if self.column not in columns:
                    raise DataError(f"{path}: has no column {self.column!r}; set column, {nearest(self.column, columns)}")
                for batch in file.iter_batches(batch_size=1024, columns=[self.column]):
                    for text in batch.column(0).to_pylist():
                        if not isinstance(text, str):
                            raise DataError(
                                f"{path}: row {row} of column {self.column!r} is {type(text).__name__}; must be a string; "
                                "set column to the column of the text, or drop the row"
                            )
                        yield Document(f"{name}:{row}", text)
                        row += 1
        except UnicodeDecodeError:
            raise DataError(f"{path}: column {self.column!r} after row {row} is not UTF-8; convert the text") from None
        except pyarrow.ArrowException as error:
            raise DataError(f"{path}: is not a readable Parquet file ({error}); write it again, or set kind") from None
