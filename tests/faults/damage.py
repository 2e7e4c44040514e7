"""Ways to damage a file: cut short, with flipped bits, and replaced by something else."""

import gzip
import io
import json
import pickle
import random
import struct
import zipfile
from collections.abc import Iterator

CUTS, FLIPS = 11, 24


def _zip() -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("data.pkl", "x")
    return stream.getvalue()


FOREIGN = {
    "nothing": b"",
    "one line break": b"\n",
    "zeros": bytes(4096),
    "noise": random.Random(0).randbytes(5000),
    "a picture": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + bytes(64),
    "gzip": gzip.compress(b"{}", mtime=0),
    "zip": _zip(),
    "a pickle": pickle.dumps({"step": 3}),
    "a page": b"<!DOCTYPE html>\n<html><body>404\nnot found</body></html>\n",
    "a pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n",
    "UTF-16": '{"steps": 3}'.encode("utf-16"),
    "UTF-32": '{"steps": 3}'.encode("utf-32"),
    "null": b"null",
    "a number": b"7\n",
    "an endless number": b"9" * 5000,
    "Infinity": b"Infinity",
    "a string": b'"text"',
    "a list": b"[1, 2, 3]",
    "an empty table": b"{}",
    "tables of tables": b'{"a": {"b": {"c": [{}]}}}',
    "another table": json.dumps({name: name for name in ("model", "step", "state", "text", "kind", "tokenizer")}).encode(),
    "nested lists": b"[" * 100_000,
    "nested tables": b'{"model":' * 100_000,
    "half of a surrogate pair": b'{"model": "\\ud800", "\\udfff": 1}',
    "half of a surrogate pair as bytes": b'{"model": "\xed\xa0\x80"}',
    "bad escapes": b'{"model": "\\x"}\n\\',
    "a long header": struct.pack("<Q", 1 << 62) + b"{}",
    "a header of other things": struct.pack("<Q", 16) + b'{"a": {"b": 1}} ',
    "GGUF that counts": b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1 << 60) + bytes(64),
    "TOML of other things": b'steps = "three"\n[model]\nkind = 7\n[[data]]\n',
}


def damaged(content: bytes) -> Iterator[tuple[str, bytes]]:
    """The content in every way, each with what was done."""
    chance = random.Random(len(content))
    for at in sorted({0, 1, len(content) - 1, *(chance.randrange(len(content)) for _ in range(CUTS))}):
        yield f"cut to {at} of {len(content)} bytes", content[:at]
    # Half of them in the beginning, where headers are.
    for index in range(FLIPS):
        at = chance.randrange(min(len(content), 512) if index % 2 else len(content))
        bit = chance.randrange(8)
        yield f"bit {bit} of byte {at} flipped", content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :]
    for what, other in FOREIGN.items():
        yield f"replaced by {what}", other
