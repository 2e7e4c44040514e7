"""Texts that people write: in UTF-8, with or without a byte order mark; anything else is named for what it is."""

from twoaxis.core.errors import DataError, TwoAxisError

_CONVERT = "convert it, for example with iconv -f {} -t UTF-8"
_UTF16, _UTF32 = (("text in " + name, _CONVERT.format(name)) for name in ("UTF-16", "UTF-32"))
_UNPACK, _PACKED = "unpack it", "compressed by {}"

SIGNATURES = (
    # Longest first: one mark begins another.
    (0, b"\xff\xfe\0\0", *_UTF32),
    (0, b"\0\0\xfe\xff", *_UTF32),
    (0, b"\xff\xfe", *_UTF16),
    (0, b"\xfe\xff", *_UTF16),
    (0, b"\x1f\x8b", _PACKED.format("gzip"), _UNPACK),
    (0, b"BZh", _PACKED.format("bzip2"), _UNPACK),
    (0, b"\xfd7zXZ\0", _PACKED.format("xz"), _UNPACK),
    (0, b"\x28\xb5\x2f\xfd", _PACKED.format("zstd"), _UNPACK),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7z archive", _UNPACK),
    (0, b"PK\x03\x04", "a zip archive, as are office documents and checkpoints of torch.save", _UNPACK),
    (257, b"ustar", "a tar archive", _UNPACK),
    (0, b"PAR1", "a Parquet file", "name it with kind = 'parquet'"),
    (0, b"GGUF", "a GGUF file", "name a text"),
    (0, b"%PDF-", "a PDF file", "extract its text"),
)
"""What files begin with that are no text in UTF-8: offset, bytes, what they are, and what to do."""

_HEAD_BYTES = 4096


def signature(content: bytes) -> tuple[str, str] | None:
    r"""What content is that is no text in UTF-8, with what to do about it; None where nothing tells.

    Example:
        >>> signature(b"\x1f\x8b\x08"), signature("a mark".encode("utf-16"))[0], signature(b"text")
        (('compressed by gzip', 'unpack it'), 'text in UTF-16', None)
    """
    for offset, magic, what, remedy in SIGNATURES:
        if content[offset : offset + len(magic)] == magic:
            return what, remedy
    # Without a mark, every other byte of most texts in UTF-16 is zero, and UTF-8 has nothing against that.
    head = content[:_HEAD_BYTES]
    zeros = sorted((head[::2].count(0), head[1::2].count(0)))
    return _UTF16 if zeros[0] == 0 and 4 * zeros[1] > len(head) else None


def decode_text(content: bytes, where: str, error: type[TwoAxisError] = DataError) -> str:
    r"""Decodes UTF-8, leaving out a byte order mark at the beginning.

    Args:
        content: of the file.
        where: what the error calls it.
        error: its class.

    Raises:
        TwoAxisError: of the class `error`, with what the content is instead, as far as its beginning tells.

    Example:
        >>> decode_text(b"\xef\xbb\xbfsteps = 3", "recipe.toml")
        'steps = 3'
    """
    if found := signature(content):
        raise error(f"{where}: is {found[0]}: must be text in UTF-8; {found[1]}")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as cause:
        byte = f"byte 0x{content[cause.start]:02x} at offset {cause.start}"
        raise error(f"{where}: {byte} is not UTF-8; convert the text, for example with iconv -t UTF-8") from None
