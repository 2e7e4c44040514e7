"""Multi-query associative recall (MQAR)."""

from typing import ClassVar, Literal

from pydantic import Field

from twoaxis.data.synthetic.base import CUE, FILLER, LOWER, UPPER, KeyedRandom, SyntheticConfig


class MqarConfig(SyntheticConfig):
    """Pairs of a key and a value, then keys as queries for their values.

    Text:     `aQcXbQ..c=Xa=Q`: keys are lower case and all different, values are upper case
    Answer:   the value that followed the key in the pairs
    Source:   Zoology: Measuring and Improving Recall in Efficient Language Models, arXiv:2312.04927
    Deviates: a cue follows each queried key; queries come in random order after a gap of fixed length, not at distances
              drawn from a power law
    Needs:    attention that matches a key with the token before each value: two layers of attention, or one layer after a
              mixer that sees the last token

    Args:
        n_pairs: pairs of a sample.
        n_queries: pairs that are queried, each once.
        n_keys: keys to draw from.
        n_values: values to draw from.
        gap: fillers between pairs and queries.

    Raises:
        ConfigError: more queries than pairs, or more pairs than keys.

    Example:
        >>> MqarConfig(n_pairs=3, n_queries=2, gap=2).sample(KeyedRandom(0))
        'lWdNuT..u=Tl=W'
    """

    bounds: ClassVar = {"n_queries": ("n_pairs", "ask for fewer"), "n_pairs": ("n_keys", "use fewer pairs")}

    kind: Literal["mqar"] = "mqar"
    n_pairs: int = Field(default=8, ge=1)
    n_queries: int = Field(default=4, ge=1)
    n_keys: int = Field(default=26, ge=1, le=26)
    n_values: int = Field(default=26, ge=1, le=26)
    gap: int = Field(default=0, ge=0)

    @property
    def sample_length(self) -> int:
        """Pairs, gap, and three tokens per query."""
        return 2 * self.n_pairs + self.gap + 3 * self.n_queries

    def sample(self, random: KeyedRandom) -> str:
        """Draws keys, values and queries."""
        keys = [LOWER[number] for number in random.permutation(self.n_keys)[: self.n_pairs]]
        values = [UPPER[number] for number in random.integers(self.n_values, self.n_pairs)]
        queries = random.permutation(self.n_pairs)[: self.n_queries]
        pairs = "".join(key + value for key, value in zip(keys, values, strict=True))
        return pairs + FILLER * self.gap + "".join(keys[index] + CUE + values[index] for index in queries)
