"""JSON Lines: one object per line, one document per object."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from twoaxis.core.errors import DataError, nearest
from twoaxis.core.text import decode_text
from twoaxis.data.corpus.scan import Document
from twoaxis.data.corpus.text_files import FileCorpusConfig


class JsonlConfig(FileCorpusConfig):
    """A JSON Lines file, or a folder of them; blank lines are left out.

    Attributes:
        field: the key of each object that holds the text.
    """

    kind: Literal["jsonl"] = "jsonl"
    pattern: str = "*.jsonl"
    field: str = "text"

    def read_file(self, path: Path, name: str) -> Iterator[Document]:
        """Reads one document per line."""
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
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
            raise DataError(
                f"{where}: has no key {self.field!r}; set field, {nearest(self.field, item) if item else 'or add it'}"
            )
        text = item[self.field]
        if not isinstance(text, str):
            raise DataError(
                f"{where}: {self.field!r} is {type(text).__name__}; must be a string; set field to the key of the text"
            )
        return text
