"""Tokenizers: one row per kind."""

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, SerializeAsAny

from twoaxis.core.errors import DataError
from twoaxis.core.registry import Row, Table
from twoaxis.core.text import json_value
from twoaxis.data.tokenizer.base import ByteConfig, ByteTokenizer, Progress, Tokenizer, TokenizerConfig
from twoaxis.data.tokenizer.compression import compressed_ids
from twoaxis.data.tokenizer.subword import END_OF_DOCUMENT, BpeConfig, FileTokenizerConfig, SubwordTokenizer

TOKENIZERS: Table[TokenizerConfig] = Table(
    "tokenizer",
    TokenizerConfig,
    "twoaxis.tokenizers",
    [
        Row(ByteConfig, "one token per byte, 256 in all", {"default": {}}),
        Row(BpeConfig, "byte-pair encoding, trained on the corpus on first use", {"default": {}, "small": {"vocab_size": 512}}),
        Row(FileTokenizerConfig, "any tokenizer.json", {"file": {"path": "tokenizer.json"}}),
    ],
)
"""The kinds of tokenizer; other packages add rows through the entry point `twoaxis.tokenizers`."""


def parse_tokenizer(data: Any) -> TokenizerConfig:
    """Reads a tokenizer from a table with `kind`, a bare kind, a bare path of a JSON file, or a configuration.

    Raises:
        ConfigError: neither a known kind nor a JSON file.

    Example:
        >>> parse_tokenizer("bpe").vocab_size, parse_tokenizer("gpt2/tokenizer.json").kind
        (4096, 'file')
    """
    if isinstance(data, Path) or (isinstance(data, str) and data.endswith(".json")):
        return FileTokenizerConfig(path=Path(data))
    return TOKENIZERS.parse(data)


def load_tokenizer(definition: str) -> Tokenizer:
    """Builds a tokenizer from its `definition`.

    Raises:
        DataError: the text is no definition.
    """
    try:
        content = json_value(definition)
        kind = content["kind"]
        if kind == "byte":
            return ByteTokenizer()
        if kind == "subword":
            begin = tuple(content.get("begin_of_document", ()))
            return SubwordTokenizer(json.dumps(content["tokenizer"]), content["end_of_document"], begin_of_document=begin)
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"tokenizer definition: not one of twoaxis ({error!r}); restore the file from its run folder") from None
    raise DataError(f"tokenizer definition: kind={kind!r} must be byte or subword; update twoaxis")


TokenizerField = Annotated[SerializeAsAny[TokenizerConfig], BeforeValidator(parse_tokenizer)]
"""The type of a configuration field that holds a tokenizer."""

__all__ = [
    "END_OF_DOCUMENT",
    "TOKENIZERS",
    "BpeConfig",
    "ByteConfig",
    "ByteTokenizer",
    "FileTokenizerConfig",
    "Progress",
    "SubwordTokenizer",
    "Tokenizer",
    "TokenizerConfig",
    "TokenizerField",
    "compressed_ids",
    "load_tokenizer",
    "parse_tokenizer",
]
