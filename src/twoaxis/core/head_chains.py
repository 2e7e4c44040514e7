"""Chains of attention layers that share heads along depth: all sublayers of one kind, in order."""

from twoaxis.core.errors import ConfigError, problem
from twoaxis.core.site import HeadShape, Site, Stack


def chains(stack: Stack) -> dict[str, HeadShape]:
    """The kinds of sublayers with heads, in order, each with the heads of its first layer."""
    found: dict[str, HeadShape] = {}
    for slot in stack.slots:
        if slot.heads is not None:
            found.setdefault(slot.kind, slot.heads)
    return found


def sites_of(stack: Stack, kind: str) -> list[Site]:
    """The sublayers of one chain in order."""
    return [site for site in stack.sites if site.slot.kind == kind]


def place_in_chain(site: Site) -> int:
    """The index of a sublayer within its chain, counted from 0."""
    return sum(slot.kind == site.slot.kind for slot in site.stack.slots[: site.index])


def check_chains(stack: Stack, mixer: str) -> None:
    """Refuses stacks whose heads cannot be shared along depth.

    Raises:
        ConfigError: no sublayer with heads, or kv-heads of different widths in one chain.
    """
    firsts = chains(stack)
    if not firsts:
        kinds = sorted({slot.kind for slot in stack.slots}) or "unknown sublayers"
        raise ConfigError(problem("blocks", kinds, "with a sublayer that has heads", f"add 'attention', or drop {mixer!r}"))
    for slot in stack.slots:
        if slot.heads is None:
            continue
        first = firsts[slot.kind]
        got, allowed = (f"{heads.n_kv_heads} x {heads.head_dim}" for heads in (slot.heads, first))
        if got != allowed:
            what = f"kv-heads of {slot.kind!r} under {mixer!r}"
            raise ConfigError(problem(what, got, f"{allowed} in every layer", "give them one n_kv_heads and head_dim"))
