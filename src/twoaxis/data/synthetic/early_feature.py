"""Retrieval of an early feature late in depth: the token itself, or what was looked up for it, and which one is known late."""

from typing import Literal, Self

from pydantic import Field, model_validator

from twoaxis.core.errors import ConfigError, problem
from twoaxis.data.synthetic.base import LOWER, UPPER, Draws, SyntheticConfig

KEEP, TAKE = "-", "+"
"""The marks of an entry that keeps its key, and of one that takes its value."""


class EarlyFeatureConfig(SyntheticConfig):
    """Entries of a key, a mark and a value, then keys; the mark says whether the key or the value is the answer.

    Text:     `a+bc-dr+fRfCcAb`: keys and values are small letters, a queried key is the capital and its own cue
    Answer:   the value where the mark is `+`, the key where it is `-`
    Source:   no published task
    Asks for: a lookup, then a choice between the embedding of the token and what the lookup wrote; a single stream must hold
              both apart until the mark is found, a depth mixer that selects among earlier outputs need not

    Args:
        n_letters: letters to draw from.
        n_entries: entries of a sample, each with a key of its own.
        n_queries: of them that are asked for, each once.

    Raises:
        ConfigError: more queries than entries, or more entries than letters.

    Example:
        >>> EarlyFeatureConfig(n_entries=3, n_queries=2).sample(Draws(0))
        'l-wd-nu+tLlUt'
    """

    kind: Literal["early_feature"] = "early_feature"
    n_letters: int = Field(default=26, ge=2, le=26)
    n_entries: int = Field(default=6, ge=1)
    n_queries: int = Field(default=6, ge=1)

    @model_validator(mode="after")
    def _enough_of_each(self) -> Self:
        if self.n_queries > self.n_entries:
            raise ConfigError(problem("n_queries", self.n_queries, f"at most n_entries={self.n_entries}", "ask for fewer"))
        if self.n_entries > self.n_letters:
            raise ConfigError(problem("n_entries", self.n_entries, f"at most n_letters={self.n_letters}", "use fewer entries"))
        return self

    @property
    def answer_cues(self) -> str:
        """The capitals."""
        return UPPER[: self.n_letters]

    @property
    def sample_length(self) -> int:
        """Three tokens per entry and two per query."""
        return 3 * self.n_entries + 2 * self.n_queries

    def sample(self, draws: Draws) -> str:
        """Draws the entries and what is asked for."""
        keys = draws.order(self.n_letters)[: self.n_entries].tolist()
        values, marks = draws.below(self.n_letters, self.n_entries).tolist(), draws.below(2, self.n_entries).tolist()
        entries = list(zip(keys, marks, values, strict=True))
        asked = [entries[index] for index in draws.order(self.n_entries)[: self.n_queries]]
        text = "".join(LOWER[key] + (KEEP, TAKE)[mark] + LOWER[value] for key, mark, value in entries)
        return text + "".join(UPPER[key] + LOWER[value if mark else key] for key, mark, value in asked)
