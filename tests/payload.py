"""What crosses the boundaries of a pipeline, by the formulas of the planner from the tensors of a model's states."""

from dataclasses import dataclass
from functools import cache
from typing import Any

from twoaxis.ledger.lines import depth_lines
from twoaxis.planner.formulas.collectives import even_cuts, hop_bytes, waiting_bytes
from twoaxis.planner.ledger import Forwarding
from twoaxis.planner.model.shape import ModelShape


@dataclass(frozen=True)
class Payload:
    """Bytes per token over each boundary, and of the gradients that begin and that end to wait, by chunk."""

    hops: tuple[int, ...]
    waiting: tuple[tuple[int, ...], tuple[int, ...]]

    @property
    def total(self) -> int:
        return sum(self.hops)

    @property
    def peak(self) -> int:
        return max(self.hops, default=0)


def edges(model: ModelShape, chunks: int) -> tuple[int, ...]:
    """The sublayers at which the chunks of a model begin, and the end."""
    lengths = [len(block) for block in model.blocks]
    return tuple(sum(lengths[:block]) for block in even_cuts(model.n_layers, chunks))


def payload(
    model: ModelShape, ranks: int, virtual: int = 1, forwarding: Forwarding = "naive", element_bytes: int = 2
) -> Payload:
    """What crosses the boundaries of a model that is cut into `ranks * virtual` chunks of whole blocks."""
    leaves = _leaves(model, element_bytes)
    cut = leaves, list(edges(model, ranks * virtual)), ranks, forwarding
    begun, ended = waiting_bytes(*cut)
    return Payload(tuple(hop_bytes(*cut)), (tuple(begun), tuple(ended)))


@cache
def _leaves(model: ModelShape, element_bytes: int) -> Any:
    """Of the states of a model, however it is cut."""
    return depth_lines(model, element_bytes, element_bytes)["leaves"]
