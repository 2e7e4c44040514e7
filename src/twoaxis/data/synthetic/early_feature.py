"""An early feature retrieved late in depth: a token, or the result of a lookup for it, as becomes known late."""

from typing import ClassVar, Literal

from pydantic import Field

from twoaxis.data.synthetic.base import LOWER, UPPER, KeyedRandom, SyntheticConfig

KEEP, TAKE = "-", "+"
"""The marks of an entry that keeps its key, and of one that takes its value."""


class EarlyFeatureConfig(SyntheticConfig):
    """Entries of a key, a mark and a value, then keys; the mark decides whether the key or the value is the answer.

    Text:     `a+bc-dr+fRfCcAb`: keys and values are lower case, a queried key is upper case and its own cue
    Answer:   the value where the mark is `+`, the key where it is `-`
    Source:   no published task
    Needs:    a lookup, then a choice between the embedding of the token and the output of the lookup; a single stream must
              hold both apart until the mark is found, a depth mixer that selects among earlier outputs need not

    Args:
        n_letters: letters to draw from.
        n_entries: entries of a sample, all with different keys.
        n_queries: entries that are queried, each once.

    Raises:
        ConfigError: more queries than entries, or more entries than letters.

    Example:
        >>> EarlyFeatureConfig(n_entries=3, n_queries=2).sample(KeyedRandom(0))
        'l-wd-nu+tLlUt'
    """

    bounds: ClassVar = {"n_queries": ("n_entries", "ask for fewer"), "n_entries": ("n_letters", "use fewer entries")}

    kind: Literal["early_feature"] = "early_feature"
    n_letters: int = Field(default=26, ge=2, le=26)
    n_entries: int = Field(default=6, ge=1)
    n_queries: int = Field(default=6, ge=1)

    @property
    def answer_cues(self) -> str:
        """The capitals."""
        return UPPER[: self.n_letters]

    @property
    def sample_length(self) -> int:
        """Three tokens per entry and two per query."""
        return 3 * self.n_entries + 2 * self.n_queries

    def sample(self, random: KeyedRandom) -> str:
        """Draws the entries and the queries."""
        keys = random.permutation(self.n_letters)[: self.n_entries].tolist()
        values, marks = (random.integers(limit, self.n_entries).tolist() for limit in (self.n_letters, 2))
        entries = list(zip(keys, marks, values, strict=True))
        queries = [entries[index] for index in random.permutation(self.n_entries)[: self.n_queries]]
        text = "".join(LOWER[key] + (KEEP, TAKE)[mark] + LOWER[value] for key, mark, value in entries)
        return text + "".join(UPPER[key] + LOWER[value if mark else key] for key, mark, value in queries)
