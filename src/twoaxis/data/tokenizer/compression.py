"""Ids that spellings of one word share, for tables of n-grams."""

from functools import cache
from typing import Any

from twoaxis.data.tokenizer.base import Tokenizer

_LONE_SPACE = "\ue000"
"""Stands for a text of one space, which is not stripped."""


def compression_key(text: str) -> str:
    r"""Returns a text without the differences in which spellings of a word differ; a text that has only these stays.

    Compatibility characters, accents, capitals and runs of white space become plain, and white space at both ends is dropped.

    Example:
        >>> compression_key("  É\n"), compression_key("Ⅳ"), compression_key("\t\n")
        ('e', 'iv', ' ')
    """
    return _normalizer().normalize_str(text) or text


@cache
def _normalizer() -> Any:
    from tokenizers import Regex, normalizers

    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex("[ \\t\\r\\n]+"), " "),
            normalizers.Replace(Regex("^ $"), _LONE_SPACE),
            normalizers.Strip(),
            normalizers.Replace(_LONE_SPACE, " "),
        ]
    )


def compressed_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Returns the new id of every token, equal for tokens of one key and numbered by first occurrence.

    Source: deepseek-ai/Engram, engram_demo_v1.py @ fb7f84a, CompressedTokenizer

    Example:
        >>> from twoaxis.data.tokenizer import ByteTokenizer
        >>> new = compressed_ids(ByteTokenizer())
        >>> new[ord("A")] == new[ord("a")], max(new) + 1
        (True, 227)
    """
    found: dict[str, int] = {}
    return tuple(found.setdefault(_key(tokenizer, token), len(found)) for token in range(tokenizer.vocab_size))


def _key(tokenizer: Tokenizer, token: int) -> str:
    spelling = tokenizer.spelling(token)
    text = tokenizer.decode([token]) or spelling
    # Part of a character: no text of its own.
    return spelling if "\ufffd" in text else compression_key(text)
