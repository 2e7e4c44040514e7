"""Lookup over several hops: follow the edges of a cycle, shown in random order, from a node a number of times."""

from typing import Literal, Self

from pydantic import Field, model_validator

from twoaxis.core.errors import ConfigError, problem
from twoaxis.data.synthetic.base import CUE, DIGITS, LOWER, Draws, SyntheticConfig


class MultiHopConfig(SyntheticConfig):
    """The edges of one directed cycle, then questions for the k-th successor of a node.

    Text:     `bcabca2a=c1b=c`: each edge is two nodes; a question is the hops, the node and the cue
    Answer:   the node reached
    Source:   Physics of Language Models: Part 4.1, arXiv:2512.17351, task Depo
    Deviates: nodes are one token each, every count of hops up to the largest is equally likely, and there is no padding
    Asks for: as many lookups in a row as hops, hence depth; a count of hops k takes about log2(k) of them once lookups are
              composed

    Args:
        n_nodes: nodes of the cycle.
        n_names: letters to name them with.
        max_hops: most hops asked for.
        n_queries: questions of a sample.

    Raises:
        ConfigError: more nodes than names, or hops that come round to the node asked about.

    Example:
        >>> MultiHopConfig(n_nodes=4, n_queries=2).sample(Draws(0))
        'nlunduld1l=d2n=d'
    """

    kind: Literal["multi_hop"] = "multi_hop"
    n_nodes: int = Field(default=6, ge=2)
    n_names: int = Field(default=26, ge=2, le=26)
    max_hops: int = Field(default=2, ge=1, le=9)
    n_queries: int = Field(default=3, ge=1)

    @model_validator(mode="after")
    def _goes_round(self) -> Self:
        if self.n_nodes > self.n_names:
            raise ConfigError(problem("n_nodes", self.n_nodes, f"at most n_names={self.n_names}", "use fewer nodes"))
        if self.max_hops >= self.n_nodes:
            allowed = f"below n_nodes={self.n_nodes}, where the cycle closes"
            raise ConfigError(problem("max_hops", self.max_hops, allowed, "use more nodes or fewer hops"))
        return self

    @property
    def sample_length(self) -> int:
        """Two tokens per edge and four per question."""
        return 2 * self.n_nodes + 4 * self.n_queries

    def sample(self, draws: Draws) -> str:
        """Draws the cycle, the order of its edges, and the questions."""
        n = self.n_nodes
        cycle = [LOWER[number] for number in draws.order(self.n_names)[:n]]
        edges = "".join(cycle[index] + cycle[(index + 1) % n] for index in draws.order(n))
        starts, hops = draws.below(n, self.n_queries).tolist(), (1 + draws.below(self.max_hops, self.n_queries)).tolist()
        asked = zip(starts, hops, strict=True)
        return edges + "".join(DIGITS[k] + cycle[start] + CUE + cycle[(start + k) % n] for start, k in asked)
