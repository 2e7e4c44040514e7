"""Texts and JSON in UTF-8, with or without a byte order mark; errors name the actual format."""

import json
import re
from pathlib import Path
from typing import Any

from twoaxis.core.errors import DataError, TwoAxisError

_CONVERT = "convert it, for example with iconv -f {} -t UTF-8"
_UTF16, _UTF32 = (("text in " + name, _CONVERT.format(name)) for name in ("UTF-16", "UTF-32"))
PARQUET = "a Parquet file"

_UNPACK, _PACKED = "unpack it", "compressed by {}"

SIGNATURES = (
    # Longest first: a mark may be the beginning of another.
    (0, rb"\xff\xfe\0\0", *_UTF32),
    (0, rb"\0\0\xfe\xff", *_UTF32),
    (0, rb"\xff\xfe", *_UTF16),
    (0, rb"\xfe\xff", *_UTF16),
    (0, rb"\x1f\x8b", _PACKED.format("gzip"), _UNPACK),
    (0, rb"BZh[1-9](1AY&SY|\x17rE8P\x90)", _PACKED.format("bzip2"), _UNPACK),
    (0, rb"\xfd7zXZ\0", _PACKED.format("xz"), _UNPACK),
    (0, rb"\x28\xb5\x2f\xfd", _PACKED.format("zstd"), _UNPACK),
    (0, rb"7z\xbc\xaf\x27\x1c", "a 7z archive", _UNPACK),
    (0, rb"PK\x03\x04", "a zip archive, as are office documents and checkpoints of torch.save", _UNPACK),
    (257, rb"ustar(\0| )", "a tar archive", _UNPACK),
    # A text may begin with these letters, so binary numbers must follow.
    (0, rb"PAR1[\0-\x08\x0e-\x1f]", PARQUET, "name it with kind = 'parquet'"),
    (0, rb"GGUF([^\0]\0\0\0|\0\0\0[^\0])", "a GGUF file", "name a text"),
    (0, rb"%PDF-\d", "a PDF file", "extract its text"),
)
"""The beginnings of files that are no text in UTF-8: offset, pattern, format, remedy."""

_HEAD_BYTES = 4096

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]")


def signature(content: bytes) -> tuple[str, str] | None:
    r"""The format of content that is no text in UTF-8, with a remedy; None if it is not recognised.

    Example:
        >>> signature(b"\x1f\x8b\x08"), signature("a mark".encode("utf-16"))[0], signature(b"text")
        (('compressed by gzip', 'unpack it'), 'text in UTF-16', None)
    """
    for offset, pattern, what, remedy in SIGNATURES:
        if re.compile(pattern).match(content, offset):
            return what, remedy
    # Most texts in UTF-16 without a mark have zeros in every other byte, which is valid UTF-8.
    head = content[:_HEAD_BYTES]
    zeros = sorted((head[::2].count(0), head[1::2].count(0)))
    return _UTF16 if zeros[0] == 0 and 4 * zeros[1] > len(head) else None


def decode_text(content: bytes, where: str, error: type[TwoAxisError] = DataError) -> str:
    r"""Decodes UTF-8, without a byte order mark at the beginning; `where` names the text in errors.

    Raises:
        TwoAxisError: of the class `error`, with the format of the content if it is recognised.

    Example:
        >>> decode_text(b"\xef\xbb\xbfsteps = 3", "recipe.toml")
        'steps = 3'
    """
    if found := signature(content):
        raise error(f"{where}: is {found[0]}: must be text in UTF-8; {found[1]}")
    try:
        # With `utf-8-sig`, errors count from behind the mark.
        return content.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as cause:
        byte = f"byte 0x{content[cause.start]:02x} at offset {cause.start}"
        raise error(f"{where}: {byte} is not UTF-8; convert the text, for example with iconv -t UTF-8") from None


def encode_text(text: str, where: str = "text", remedy: str = "remove it") -> bytes:
    """Encodes text as UTF-8.

    Raises:
        DataError: half of a surrogate pair, which is not Unicode text.
    """
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        half = f"character {error.start} is half of a surrogate pair"
        raise DataError(f"{where}: {half}; must be Unicode text; {remedy}") from None


def read_text(path: Path, what: str, remedy: str, error: type[TwoAxisError] = DataError) -> str:
    """Reads a text file, `what` in errors; see `decode_text`.

    Raises:
        TwoAxisError: of the class `error`: it cannot be read, or is no text in UTF-8.
    """
    try:
        content = path.read_bytes()
    # ValueError: a path with an invalid character.
    except (OSError, ValueError) as cause:
        raise error(f"{what}: cannot be read ({getattr(cause, 'strerror', None) or cause}); {remedy}") from None
    return decode_text(content, what, error)


def json_value(content: str | bytes) -> Any:
    """Reads JSON that may be damaged.

    Raises:
        ValueError: no JSON in UTF-8, nesting that is too deep, an escape of half of a surrogate pair, or a key with two values.

    Example:
        >>> json_value(b'{"step": 3}')
        {'step': 3}
    """
    text = content if isinstance(content, str) else content.decode("utf-8-sig")
    try:
        value = json.loads(text, object_pairs_hook=_with_one_value_each)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if _SURROGATE.search(text) and _SURROGATE.search(json.dumps(value, ensure_ascii=False)):
        raise ValueError("half of a surrogate pair")
    return value


def _with_one_value_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The table of these pairs; else the last value of a key would count, and the others would be dropped without a word."""
    found = dict(pairs)
    if len(found) < len(pairs):
        for key, value in pairs:
            if json.dumps(value) != json.dumps(found[key]):
                raise ValueError(f"key {key!r} has two values")
    return found
