"""Heads that attention layers share along depth: all sublayers of one kind, in order, are one chain.

Letters: B batch, T position, D width.
"""

from typing import Any, NamedTuple, Self

from torch import Tensor

from twoaxis.core.errors import ConfigError, problem
from twoaxis.core.position import HeadShape, LayerStack, SublayerPosition
from twoaxis.depth.base import DepthEnds, Layout, Stream


def chains(stack: LayerStack) -> dict[str, HeadShape]:
    """Returns the kinds of sublayers with heads, in order of appearance, each with the heads of its first layer."""
    found: dict[str, HeadShape] = {}
    for slot in stack.slots:
        if slot.heads is not None:
            found.setdefault(slot.kind, slot.heads)
    return found


def chain_of(site: SublayerPosition) -> int:
    """Returns the number of the chain that a sublayer is part of."""
    return list(chains(site.stack)).index(site.slot.kind)


def place_in_chain(site: SublayerPosition) -> int:
    """Counts the sublayers of its chain before a sublayer."""
    return sum(slot.kind == site.slot.kind for slot in site.stack.slots[: site.index])


def check_chains(stack: LayerStack, mixer: str) -> None:
    """Refuses stacks whose heads a mixer cannot pass from layer to layer.

    Raises:
        ConfigError: no sublayer with heads, or kv-heads of different widths in one chain.
    """
    firsts = chains(stack)
    if not firsts and not stack.slots:
        raise ConfigError(
            f"depth mixer {mixer!r} works on the heads of attention: must be used in a Decoder; choose another mixer"
        )
    if not firsts:
        kinds = sorted({slot.kind for slot in stack.slots})
        raise ConfigError(problem("blocks", kinds, "with a sublayer that has heads", f"add 'attention', or drop {mixer!r}"))
    for slot in stack.slots:
        if slot.heads is None:
            continue
        first = firsts[slot.kind]
        got, allowed = (f"{heads.n_kv_heads} x {heads.head_dim}" for heads in (slot.heads, first))
        if got != allowed:
            what = f"kv-heads of {slot.kind!r} under {mixer!r}"
            raise ConfigError(problem(what, got, f"{allowed} in every layer", "give them one n_kv_heads and head_dim"))


class StreamAndHeads(NamedTuple):
    """The depth state: the plain stream, and for each chain the tensors that its layers pass to later ones."""

    stream: Stream
    heads: tuple[tuple[Tensor, ...], ...]

    def with_heads(self, chain: int, *more: Tensor) -> Self:
        """Returns the state with more tensors at the end of one chain."""
        return self.with_chain(chain, (*self.heads[chain], *more))

    def with_chain(self, chain: int, tensors: tuple[Tensor, ...]) -> Self:
        """Returns the state with these tensors in one chain."""
        chain %= len(self.heads)
        return self._replace(heads=(*self.heads[:chain], tensors, *self.heads[chain + 1 :]))


class HeadsEnds(DepthEnds):
    """The stream starts as the embeddings, with empty chains.

    Args:
        stack: the sublayers.
        more: chains of the mixer's own, at the end.
    """

    def __init__(self, stack: LayerStack, more: int = 0) -> None:
        super().__init__()
        self.n_chains = len(chains(stack)) + more

    def enter(self, embeddings: Stream, layout: Layout = None, cache: Any = None) -> tuple[StreamAndHeads, Any]:
        """Returns the embeddings and empty chains."""
        return StreamAndHeads(embeddings, ((),) * self.n_chains), cache

    def leave(self, state: StreamAndHeads, layout: Layout = None, cache: Any = None) -> tuple[Stream, Any]:
        """Returns the stream."""
        return state.stream, cache
