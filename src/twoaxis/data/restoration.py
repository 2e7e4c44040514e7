"""Text that a tokenizer loses, and the bits that would restore it.

The likelihood of tokens is that of a text only if the tokens determine the text. Otherwise bits per byte are too small: 0 for a
tokenizer that maps text to nothing. Lost text is therefore charged with the length of a patch from the decoded tokens to the
text, in a decodable code. Each difference costs the number of equal characters before it, of dropped characters and of inserted
bytes, each in 2 floor(log2(n + 1)) + 1 bits (Elias gamma), and 8 bits for each inserted byte. Like every code it is an upper
bound; it is 0 if nothing is lost.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from twoaxis.data.tokenizer import Tokenizer

WINDOW, CERTAIN = 64, 3
"""Characters searched for the next agreement of two texts, and characters that must agree there."""


@dataclass(frozen=True)
class Restoration:
    """The part of a text that decoding its tokens does not restore.

    Attributes:
        text_bytes: of the text in UTF-8.
        lost_bytes: bytes that are not restored; at least 1 for each difference.
        repair_bits: the length of the patch.

    Example:
        >>> Restoration.of("One Two", "one two")
        Restoration(text_bytes=7, lost_bytes=2, repair_bits=34)
    """

    text_bytes: int = 0
    lost_bytes: int = 0
    repair_bits: int = 0

    @classmethod
    def of(cls, text: str, decoded: str) -> Self:
        """Compares a text with its decoded tokens."""
        lost = bits = 0
        for alike, dropped, missing in differences(text, decoded):
            size = len(missing.encode())
            lost += max(1, size)
            bits += _gamma_bits(alike) + _gamma_bits(len(dropped)) + _gamma_bits(size) + 8 * size
        whole = len(text.encode())
        return cls(whole, min(lost, whole), bits)

    @classmethod
    def by(cls, tokenizer: Tokenizer, text: str) -> Self:
        """Encodes a text, decodes it, and compares."""
        if tokenizer.is_lossless:
            return cls(len(text.encode()))
        return cls.of(text, tokenizer.decode(tokenizer.encode(text)))

    def __add__(self, other: "Restoration") -> "Restoration":
        """The restoration of both texts together."""
        text_bytes, lost_bytes = self.text_bytes + other.text_bytes, self.lost_bytes + other.lost_bytes
        return Restoration(text_bytes, lost_bytes, self.repair_bits + other.repair_bits)

    @property
    def bits_per_byte(self) -> float:
        """The length of the patch per byte of the text."""
        return self.repair_bits / self.text_bytes if self.text_bytes else 0.0

    def words(self, what: str) -> str:
        """The loss in one sentence; empty if nothing is lost.

        Example:
            >>> Restoration.of("One Two", "one two").words("the text")
            'the tokenizer loses 28.6 % of the text (2 of 7 bytes): bits per byte include 4.857 for what would restore it'
        """
        if not self.repair_bits:
            return ""
        share = f"{100 * self.lost_bytes / self.text_bytes:.3g} % of {what} ({self.lost_bytes:,} of {self.text_bytes:,} bytes)"
        return f"the tokenizer loses {share}: bits per byte include {self.bits_per_byte:.4g} for what would restore it"


def differences(text: str, decoded: str) -> Iterator[tuple[int, str, str]]:
    """The differences between two texts: the equal characters before each, and the two differing parts.

    Example:
        >>> list(differences("a naïve test", "a nave  test"))
        [(4, '', 'ï'), (3, ' ', '')]
    """
    here = there = 0
    while True:
        alike = _alike(text, here, decoded, there)
        here, there = here + alike, there + alike
        if here == len(text) and there == len(decoded):
            return
        missing, dropped = _until_alike(text, here, decoded, there)
        yield alike, decoded[there : there + dropped], text[here : here + missing]
        here, there = here + missing, there + dropped


def _alike(text: str, here: int, decoded: str, there: int) -> int:
    """The number of equal characters from two positions on."""
    found, step = 0, 1 << 16
    while step:
        one, other = text[here + found : here + found + step], decoded[there + found : there + found + step]
        if one and one == other:
            found += len(one)
        else:
            step //= 4
    return found


def _until_alike(text: str, here: int, decoded: str, there: int) -> tuple[int, int]:
    """The characters to skip on either side, up to the next agreement."""
    rest, other = text[here : here + WINDOW + CERTAIN], decoded[there : there + WINDOW + CERTAIN]
    found_at = {other[at : at + CERTAIN]: at for at in range(len(other) - CERTAIN, -1, -1)}
    found: tuple[int, int] | None = None
    for missing in range(len(rest) - CERTAIN + 1):
        if found and missing >= sum(found):
            break
        dropped = found_at.get(rest[missing : missing + CERTAIN])
        if dropped is not None and (found is None or missing + dropped < sum(found)):
            found = missing, dropped
    if found:
        return found
    if len(rest) <= WINDOW and len(other) <= WINDOW:
        # Both end; the last characters may be equal.
        end = _alike(rest[::-1], 0, other[::-1], 0)
        return len(rest) - end, len(other) - end
    # Much is dropped, unless one of them ends.
    return (min(WINDOW, len(rest)), 0) if rest and other else (len(rest), len(other))


def _gamma_bits(number: int) -> int:
    return 2 * (number + 1).bit_length() - 1
