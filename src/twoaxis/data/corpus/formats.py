"""Detects the kind of corpus of a file by its content, and of a folder by the names and content of its files."""

import json
import re
from codecs import BOM_UTF8
from itertools import islice
from pathlib import Path

from twoaxis.core.errors import ConfigError
from twoaxis.core.text import PARQUET, signature

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
    suffixes = sorted({path.suffix for path in folder.rglob("*") if path.suffix and path.is_file()})
    known = {pattern.removeprefix("*"): (kind, pattern) for kind, patterns in PATTERNS.items() for pattern in patterns}
    found = [suffix for suffix in suffixes if suffix in known or suffix in UNREADABLE]
    if len(found) > 1 or (found and found[0] not in known):
        names = ", ".join(f"*{suffix}" for suffix in found)
        allowed = f"of one kind: {', '.join(f'*{suffix}' for suffix in known)}"
        raise ConfigError(f"folder {folder} holds {names}: must be {allowed}; name its files with kind and pattern")
    if not found:
        return {"kind": "text"}
    kind, pattern = known[found[0]]
    for path in islice((path for path in sorted(folder.rglob(pattern)) if path.is_file()), _FILES):
        if (other := _of_file(path)) != kind:
            raise ConfigError(
                f"folder {folder} holds {other} in {path.name}: must be {kind}; name its files with kind and pattern"
            )
    return {"kind": kind, "pattern": pattern}


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
