"""Multi-hop lookup: follow the edges of a cycle, listed in random order."""

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from twoaxis.core.errors import ConfigError, problem
from twoaxis.data.synthetic.base import CUE, DIGITS, LOWER, KeyedRandom, SyntheticConfig


class MultiHopConfig(SyntheticConfig):
    """The edges of one directed cycle, then questions for the k-th successor of a node.

    Text:     `bcabca2a=c1b=c`: each edge is two nodes; a question is the hops, the node and the cue
    Answer:   the node reached
    Source:   Physics of Language Models: Part 4.1, arXiv:2512.17351, task Depo
    Deviates: nodes are one token each, every count of hops up to the largest is equally likely, and there is no padding
    Needs:    as many lookups in sequence as hops, hence depth; k hops need about log2(k) lookups if lookups are composed

    Args:
        n_nodes: nodes of the cycle.
        n_names: letters to draw their names from.
        max_hops: most hops of a question.
        n_queries: questions of a sample.

    Raises:
        ConfigError: more nodes than names, or as many hops as nodes.

    Example:
        >>> MultiHopConfig(n_nodes=4, n_queries=2).sample(KeyedRandom(0))
        'nlunduld1l=d2n=d'
    """

    bounds: ClassVar = {"n_nodes": ("n_names", "use fewer nodes")}

    kind: Literal["multi_hop"] = "multi_hop"
    n_nodes: int = Field(default=6, ge=2)
    n_names: int = Field(default=26, ge=2, le=26)
    max_hops: int = Field(default=2, ge=1, le=9)
    n_queries: int = Field(default=3, ge=1)

    @model_validator(mode="after")
    def _ends_before_its_start(self) -> Self:
        if self.max_hops >= self.n_nodes:
            allowed = f"below n_nodes={self.n_nodes}, where the cycle closes"
            raise ConfigError(problem("max_hops", self.max_hops, allowed, "use more nodes or fewer hops"))
        return self

    @property
    def sample_length(self) -> int:
        """Two tokens per edge and four per question."""
        return 2 * self.n_nodes + 4 * self.n_queries

    def sample(self, random: KeyedRandom) -> str:
        """Draws the cycle, the order of its edges, and the questions."""
        n = self.n_nodes
        cycle = [LOWER[number] for number in random.permutation(self.n_names)[:n]]
        edges = "".join(cycle[index] + cycle[(index + 1) % n] for index in random.permutation(n))
        starts, hops = random.integers(n, self.n_queries).tolist(), random.integers(self.max_hops, self.n_queries).tolist()
        queries = ((start, hop + 1) for start, hop in zip(starts, hops, strict=True))
        return edges + "".join(DIGITS[k] + cycle[start] + CUE + cycle[(start + k) % n] for start, k in queries)
