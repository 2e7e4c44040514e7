"""Following the metadata of a GGUF file to its end, before the library gguf takes memory for whatever it counts.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3.
"""

import struct
from pathlib import Path
from typing import BinaryIO

MAGIC, VERSIONS = b"GGUF", (2, 3)
SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes by type, of numbers and truth values."""

STRING, ARRAY = 8, 9
MAX_DIMS, MAX_NESTED = 8, 4


def follow_metadata(path: Path) -> None:
    """Reads every count and length up to the tensors.

    Raises:
        ValueError: another kind of file, or a count that goes beyond its end.
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        metadata = _Metadata(file, path.stat().st_size)
        n_tensors, n_fields = metadata.begin()
        for _ in range(n_fields):
            metadata.key()
            metadata.value(metadata.number("I"))
        for _ in range(n_tensors):
            metadata.key()
            n_dims = metadata.number("I")
            if n_dims > MAX_DIMS:
                raise ValueError(f"a tensor of {n_dims} dimensions")
            # Sizes, type and place.
            metadata.skip(8 * n_dims + 4 + 8)


class _Metadata:
    def __init__(self, file: BinaryIO, size: int) -> None:
        self.file, self.size, self.order = file, size, "<"

    def begin(self) -> tuple[int, int]:
        """How many tensors and how many fields there are."""
        if (magic := self.file.read(4)) != MAGIC:
            raise ValueError(f"it begins with {magic!r}, must begin with {MAGIC!r}")
        version = self.number("I")
        # Of a machine that writes the highest byte first.
        if version and version % (1 << 16) == 0:
            self.order, version = ">", version >> 24
        if version not in VERSIONS:
            raise ValueError(f"version {version}, must be one of {VERSIONS}")
        return self.number("Q"), self.number("Q")

    def number(self, form: str) -> int:
        n_bytes = struct.calcsize(f"<{form}")
        if len(content := self.file.read(n_bytes)) < n_bytes:
            raise ValueError("it ends within its metadata")
        return struct.unpack(self.order + form, content)[0]

    def skip(self, n_bytes: int) -> None:
        if n_bytes > self.size - self.file.tell():
            raise ValueError("it ends within its metadata, or counts more than it holds")
        self.file.seek(n_bytes, 1)

    def key(self) -> None:
        # Names of a few bytes; the format allows 2**16 - 1.
        if (length := self.number("Q")) >= 1 << 16:
            raise ValueError(f"a name of {length} bytes")
        self.skip(length)

    def value(self, kind: int, nested: int = 0) -> None:
        if kind in SCALARS:
            self.skip(SCALARS[kind])
        elif kind == STRING:
            self.skip(self.number("Q"))
        elif kind == ARRAY and nested < MAX_NESTED:
            kind, count = self.number("I"), self.number("Q")
            if kind in SCALARS:
                self.skip(count * SCALARS[kind])
                return
            for _ in range(count):
                self.value(kind, nested + 1)
        else:
            raise ValueError(f"a value of type {kind}")
