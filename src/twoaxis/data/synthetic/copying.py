"""Copying across gaps: induction on symbols that do not stand next to each other."""

from typing import Literal, Self

from pydantic import Field, model_validator

from twoaxis.core.errors import ConfigError, problem
from twoaxis.data.synthetic.base import CUE, FILLER, LOWER, Draws, SyntheticConfig

BEGIN = "|"
"""Stands before the symbols and before their copy."""


class CopyConfig(SyntheticConfig):
    """Symbols with blanks strewn among them, then the symbols in order without the blanks.

    Text:     `|a..c.b|=a=c=b`: the symbols are all different
    Answer:   the first symbol after the one copied last
    Source:   Mamba, arXiv:2312.00752, section 4.1.1 (selective copying); with n_blanks=0 it is induction,
              arXiv:2209.11895
    Deviates: a cue precedes every symbol of the copy, and no symbol comes twice, so that what has been copied last tells
              what comes next
    Asks for: attention that finds the symbol before the blanks, then one that matches it; a short window does both where
              gaps are short

    Args:
        n_symbols: symbols to copy.
        n_blanks: blanks among and around them, at random places.
        n_letters: symbols to draw from.

    Raises:
        ConfigError: more symbols than letters.

    Example:
        >>> CopyConfig(n_symbols=3, n_blanks=3).sample(Draws(0))
        '|..ld.u|=l=d=u'
    """

    kind: Literal["copy"] = "copy"
    n_symbols: int = Field(default=6, ge=1)
    n_blanks: int = Field(default=6, ge=0)
    n_letters: int = Field(default=26, ge=1, le=26)

    @model_validator(mode="after")
    def _enough_letters(self) -> Self:
        if self.n_symbols > self.n_letters:
            raise ConfigError(problem("n_symbols", self.n_symbols, f"at most n_letters={self.n_letters}", "copy fewer"))
        return self

    @property
    def sample_length(self) -> int:
        """Symbols, blanks, two marks, and two tokens per copied symbol."""
        return 3 * self.n_symbols + self.n_blanks + 2

    def sample(self, draws: Draws) -> str:
        """Draws the symbols and their places."""
        symbols = [LOWER[number] for number in draws.order(self.n_letters)[: self.n_symbols]]
        places = sorted(draws.order(self.n_symbols + self.n_blanks)[: self.n_symbols].tolist())
        text = [FILLER] * (self.n_symbols + self.n_blanks)
        for place, symbol in zip(places, symbols, strict=True):
            text[place] = symbol
        return BEGIN + "".join(text) + BEGIN + "".join(CUE + symbol for symbol in symbols)
