"""Bytes at the stage boundaries of a model that is cut into a pipeline.

Recomputing the history at the receiver is no further way to send less: a source is the output of sublayers whose weights lie
on another rank. What shrinks it is another cut, the cache of a rank, or larger source blocks.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from twoaxis.core.errors import ConfigError, nearest, problem
from twoaxis.ledger.lines import depth_lines
from twoaxis.planner.formulas.crossing import even_cuts, hop_bytes, waiting_bytes
from twoaxis.planner.model.shape import ModelShape

Forwarding = Literal["naive", "cached", "cached_own"]
"""What a boundary sends: see `crossing.hop_bytes`."""

FORWARDINGS: tuple[Forwarding, ...] = get_args(Forwarding)


@dataclass(frozen=True)
class Payload:
    """What crosses the boundaries of one pipeline.

    Attributes:
        ranks: P.
        hops: bytes per token over the boundary after each chunk but the last, in one direction; the other has as many.
        waiting: bytes per token of gradients that begin, and that end, to wait on a rank for an earlier chunk, by chunk.
    """

    ranks: int
    hops: tuple[int, ...]
    waiting: tuple[tuple[int, ...], tuple[int, ...]]

    @property
    def total(self) -> int:
        """Bytes per token over all boundaries, in one direction."""
        return sum(self.hops)

    @property
    def peak(self) -> int:
        """Bytes per token over the boundary that carries most."""
        return max(self.hops, default=0)

    @property
    def received(self) -> tuple[int, ...]:
        """Bytes per token that each rank receives for all its chunks, and so holds while a microbatch is in all of them."""
        return tuple(sum(hop for chunk, hop in enumerate(self.hops, 1) if chunk % self.ranks == r) for r in range(self.ranks))

    def of_microbatch(self, tokens: int) -> list[float]:
        """Bytes of a microbatch of so many tokens over each boundary, for `formulas.peak_memory`."""
        return [tokens * hop for hop in self.hops]

    def waiting_of_microbatch(self, tokens: int) -> list[list[float]]:
        """Bytes of gradients of a microbatch of so many tokens that wait, for `formulas.peak_memory`."""
        return [[tokens * each for each in part] for part in self.waiting]


def edges(model: ModelShape, chunks: int) -> tuple[int, ...]:
    """The sublayers at which the chunks of a model begin, and the end: whole blocks, as many in each as they divide.

    Raises:
        ConfigError: more chunks than blocks.
    """
    if not 1 <= chunks <= model.n_layers:
        allowed = f"between 1 and the {model.n_layers} layers of {model.name}"
        raise ConfigError(problem("pipeline * virtual", chunks, allowed, "use fewer stages"))
    lengths = [len(block) for block in model.blocks]
    return tuple(sum(lengths[:block]) for block in even_cuts(model.n_layers, chunks))


def payload(
    model: ModelShape, ranks: int, virtual: int = 1, forwarding: Forwarding = "naive", element_bytes: int = 2
) -> Payload:
    """What crosses the boundaries when a model is cut into `ranks * virtual` chunks of whole blocks.

    The tensors of the state are those that its depth mixer makes; a tensor that a state holds twice is sent once.

    Raises:
        ConfigError: more chunks than blocks, or an unknown forwarding.
    """
    if forwarding not in FORWARDINGS:
        raise ConfigError(problem("forwarding", forwarding, "known", nearest(forwarding, FORWARDINGS)))
    leaves = depth_lines(model, element_bytes, element_bytes)["leaves"]
    cut = leaves, list(edges(model, ranks * virtual)), ranks, forwarding
    begun, ended = waiting_bytes(*cut)
    return Payload(ranks, tuple(hop_bytes(*cut)), (tuple(begun), tuple(ended)))


def with_block_sizes(model: ModelShape, sizes: Iterable[int]) -> dict[str, ModelShape]:
    """A model with larger and larger source blocks, by name; 1 is the full history.

    Raises:
        ConfigError: a depth mixer without source blocks of a free size.
    """
    if "block_size" not in type(model.depth).model_fields:
        remedy = "plan one that sums sublayers into sources, such as 'attention_residuals'"
        raise ConfigError(problem("depth", model.depth.kind, "a mixer with a block_size", remedy))
    return {
        "full" if size == 1 else f"blocks of {size}": model.with_depth(model.depth.replace(block_size=size)) for size in sizes
    }


def compare(
    models: Mapping[str, ModelShape], ranks: int, virtual: int = 1, element_bytes: int = 2
) -> dict[tuple[str, Forwarding], Payload]:
    """The payload of every model with every forwarding."""
    return {
        (name, forwarding): payload(model, ranks, virtual, forwarding, element_bytes)
        for name, model in models.items()
        for forwarding in FORWARDINGS
    }
