"""Copying across gaps: induction on symbols that are not adjacent."""

from typing import ClassVar, Literal

from pydantic import Field

from twoaxis.data.synthetic.base import CUE, FILLER, LOWER, KeyedRandom, SyntheticConfig

BEGIN = "|"
"""Precedes the symbols and their copy."""


class CopyConfig(SyntheticConfig):
    """Symbols with random blanks between them, then the symbols in order without the blanks.

    Text:     `|a..c.b|=a=c=b`: the symbols are all different
    Answer:   the first symbol after the one copied last
    Source:   Mamba, arXiv:2312.00752, section 4.1.1 (selective copying); with n_blanks=0 it is induction,
              arXiv:2209.11895
    Deviates: a cue precedes every symbol of the copy, and no symbol occurs twice, so that the last copied symbol determines
              the next
    Needs:    attention that finds the symbol before the blanks, then attention that matches it; a short window does both
              where gaps are short

    Args:
        n_symbols: symbols to copy.
        n_blanks: blanks between and around them, at random positions.
        n_letters: symbols to draw from.

    Raises:
        ConfigError: more symbols than letters.

    Example:
        >>> CopyConfig(n_symbols=3, n_blanks=3).sample(KeyedRandom(0))
        '|..ld.u|=l=d=u'
    """

    bounds: ClassVar = {"n_symbols": ("n_letters", "copy fewer")}

    kind: Literal["copy"] = "copy"
    n_symbols: int = Field(default=6, ge=1)
    n_blanks: int = Field(default=6, ge=0)
    n_letters: int = Field(default=26, ge=1, le=26)

    @property
    def sample_length(self) -> int:
        """Symbols, blanks, two marks, and two tokens per copied symbol."""
        return 3 * self.n_symbols + self.n_blanks + 2

    def sample(self, random: KeyedRandom) -> str:
        """Draws the symbols and their positions."""
        symbols = [LOWER[number] for number in random.permutation(self.n_letters)[: self.n_symbols]]
        positions = sorted(random.permutation(self.n_symbols + self.n_blanks)[: self.n_symbols].tolist())
        text = [FILLER] * (self.n_symbols + self.n_blanks)
        for position, symbol in zip(positions, symbols, strict=True):
            text[position] = symbol
        return BEGIN + "".join(text) + BEGIN + "".join(CUE + symbol for symbol in symbols)
