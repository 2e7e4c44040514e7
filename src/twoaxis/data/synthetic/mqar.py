"""Associative recall with several queries (MQAR): which value came with this key?"""

from typing import Literal, Self

from pydantic import Field, model_validator

from twoaxis.core.errors import ConfigError, problem
from twoaxis.data.synthetic.base import CUE, FILLER, LOWER, UPPER, Draws, SyntheticConfig


class MqarConfig(SyntheticConfig):
    """Pairs of a key and a value, then keys whose values are asked for.

    Text:     `aQcXbQ..c=Xa=Q`: keys are small letters and all different, values are capitals
    Answer:   the value that followed the key in the pairs
    Source:   Zoology: Measuring and Improving Recall in Efficient Language Models, arXiv:2312.04927
    Deviates: a cue follows each queried key; queries come in random order after a gap of fixed length, not at distances
              drawn from a power law
    Asks for: attention that matches a key with what stood one token before: two layers of attention, or one layer behind
              a mixer that sees the last token

    Args:
        n_pairs: pairs of a sample.
        n_queries: of them that are asked for, each once.
        n_keys: keys to draw from.
        n_values: values to draw from.
        gap: fillers between pairs and queries.

    Raises:
        ConfigError: more queries than pairs, or more pairs than keys.

    Example:
        >>> MqarConfig(n_pairs=3, n_queries=2, gap=2).sample(Draws(0))
        'lWdNuT..u=Tl=W'
    """

    kind: Literal["mqar"] = "mqar"
    n_pairs: int = Field(default=8, ge=1)
    n_queries: int = Field(default=4, ge=1)
    n_keys: int = Field(default=26, ge=1, le=26)
    n_values: int = Field(default=26, ge=1, le=26)
    gap: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _enough_of_each(self) -> Self:
        if self.n_queries > self.n_pairs:
            raise ConfigError(problem("n_queries", self.n_queries, f"at most n_pairs={self.n_pairs}", "ask for fewer"))
        if self.n_pairs > self.n_keys:
            raise ConfigError(problem("n_pairs", self.n_pairs, f"at most n_keys={self.n_keys}", "use fewer pairs"))
        return self

    @property
    def sample_length(self) -> int:
        """Pairs, gap, and three tokens per query."""
        return 2 * self.n_pairs + self.gap + 3 * self.n_queries

    def sample(self, draws: Draws) -> str:
        """Draws keys, values and what is asked for."""
        keys = [LOWER[number] for number in draws.order(self.n_keys)[: self.n_pairs]]
        values = [UPPER[number] for number in draws.below(self.n_values, self.n_pairs)]
        asked = draws.order(self.n_pairs)[: self.n_queries]
        pairs = "".join(key + value for key, value in zip(keys, values, strict=True))
        return pairs + FILLER * self.gap + "".join(keys[index] + CUE + values[index] for index in asked)
