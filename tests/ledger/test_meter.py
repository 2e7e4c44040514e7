"""The meter finds what mixers declare: states, traffic, what autograd saves and what caches hold.

As a script it compares all examples, in more stacks and shapes than the test has time for, and counts; name kinds to pick some.

    python tests/ledger/test_meter.py [KIND ...]
"""

import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from twoaxis.core.cost import Shape
from twoaxis.core.site import Site, Slot
from twoaxis.core.state import Flow
from twoaxis.depth import DEPTH, DepthConfig
from twoaxis.feed_forward import FEED_FORWARD
from twoaxis.ledger import decoder as measured
from twoaxis.ledger.stack import DepthOperation, StackTrace
from twoaxis.ledger.sublayer import sublayer_cache_bytes, sublayer_saved_bytes
from twoaxis.local import LOCAL, LocalConfig
from twoaxis.model import DecoderConfig
from twoaxis.model import memory as declared
from twoaxis.model.cost import decoder_cost, norm_cost
from twoaxis.sequence import SEQUENCE
from twoaxis.testing.toy import ATTENTION, D_MODEL, decoder_config, toy_cost, toy_site

ELEMENT_BYTES = (2, 4)
"""A dtype narrower than its statistics, and one as wide."""

STACKS: tuple[dict[str, Any], ...] = ({"n_layers": 2}, {"n_layers": 4, "blocks": ((ATTENTION,),)})
"""Blocks of attention and a feed-forward, and single sublayers."""

SHAPES = ((2, 9), (1, 1), (1, 40), (2, 70))
"""Sequences and their tokens: fewer and more than a window, a chunk or a kernel of an example has."""

Pair = tuple[str, object, object]
"""A quantity, what the meter finds and what is declared."""


def pairs(config: Any, element_bytes: int, *, fast: bool) -> Iterator[Pair]:
    """Every quantity of a mixer of any axis; fast in one stack and one shape."""
    first = Shape(*SHAPES[0], element_bytes)
    if isinstance(config, DepthConfig):
        for changes in STACKS[:1] if fast else ({}, *STACKS):
            model = decoder_config(config, **changes)
            yield from _depth(model, first)
            yield from _decoder(model, first)
        return
    for shape in SHAPES[:1] if fast else SHAPES:
        yield from _sublayer(config, toy_site(), Shape(*shape, element_bytes))
    if not fast:
        yield from _decoder(decoder_config(config), first)


def _depth(model: DecoderConfig, shape: Shape) -> Iterator[Pair]:
    depth, stack, tokens = model.depth, model.stack, shape.total_tokens
    found = measured.decoder_trace(model, shape)
    yield from _states(model, found, shape)
    for site, operation in zip(stack.sites, found.sublayers, strict=True):
        where, cost = f"sublayer {site.index}", depth.cost(site, shape)
        yield from _operation(where, operation, depth.flow(site), tokens, shape.element_bytes)
        yield f"{where}: saved", operation.saved, cost.saved_bytes
        yield f"{where}: cache", operation.cache, cost.cache_bytes
        norms = norm_cost(model.norm, site.d_model, shape).saved_bytes * (3 if depth.splits_views(site) else 1)
        between = declared._handed_over(depth, site, shape) + norms
        yield f"{where}: handed over, padding and norms", found.handed_over(site.index), between
        if operation.heads_saved:
            yield f"{where}: heads saved", operation.heads_saved, model.parts[site.index].cost(site, shape).saved_bytes
    cost = depth.ends_cost(stack, shape)
    yield from _operation("ends", found.ends, depth.ends_flow(stack), tokens, shape.element_bytes)
    yield "ends: saved", found.ends.saved, cost.saved_bytes
    yield "ends: cache", found.ends.cache, cost.cache_bytes


def _states(model: DecoderConfig, found: StackTrace, shape: Shape) -> Iterator[Pair]:
    first: dict[str, int] = {}
    names: dict[int, str] = {}
    for index, state in enumerate(found.states):
        leaves = model.depth.state(model.stack, index)
        yield f"state {index}: tensors", len(state), len(leaves)
        yield f"state {index}: elements", found.state_elements(index), model.depth.state_floats(model.stack, index)
        for leaf, tensor in zip(leaves, state, strict=True):
            where = f"state {index}, {leaf.name!r}"
            yield f"{where}: elements", tensor.elements, shape.total_tokens * leaf.numbers.count
            yield f"{where}: bytes", tensor.bytes, shape.total_tokens * leaf.numbers.bytes(shape.element_bytes)
            yield f"{where}: saved", tensor.saved, leaf.kept
            yield f"{where}: the first of its name", tensor.number, first.setdefault(leaf.name, tensor.number)
            yield f"{where}: name", names.setdefault(tensor.number, leaf.name), leaf.name


def _operation(where: str, found: DepthOperation, flow: Flow, tokens: int, element_bytes: int) -> Iterator[Pair]:
    yield f"{where}: read", found.read, tokens * flow.read.bytes(element_bytes)
    yield f"{where}: written", found.written, tokens * flow.written.bytes(element_bytes)
    yield f"{where}: views", found.views, tokens * flow.views.bytes(element_bytes)
    yield f"{where}: saves the update", found.saves_update, flow.keeps_update


def _decoder(model: DecoderConfig, shape: Shape) -> Iterator[Pair]:
    yield "decoder: saved", measured.decoder_saved_bytes(model, shape), declared.decoder_saved_bytes(model, shape)
    yield "decoder: recomputing", measured.recomputing_saved_bytes(model, shape), declared.recomputing_saved_bytes(model, shape)
    yield "decoder: blocks", measured.blocks_saved_bytes(model, shape), declared.blocks_saved_bytes(model, shape)
    yield "decoder: cache", measured.decoder_cache_bytes(model, shape), decoder_cost(model, shape).cache_bytes


def _sublayer(config: Any, site: Site, shape: Shape) -> Iterator[Pair]:
    cost, where = toy_cost(config, shape, d_model=D_MODEL), f"{shape.batch} x {shape.tokens}"
    yield f"{where}: saved", sublayer_saved_bytes(config, site, shape), cost.saved_bytes
    yield f"{where}: cache", sublayer_cache_bytes(config, site, shape), cost.cache_bytes
    if not isinstance(config, LocalConfig):
        slots = tuple(Slot(config.kind, update_extra=2) for _ in site.stack.sites)
        wider = replace(site, stack=replace(site.stack, slots=slots))
        yield f"{where}: saved", sublayer_saved_bytes(config, wider, shape), config.cost(wider, shape).saved_bytes


ROWS = [row for table in (DEPTH, SEQUENCE, FEED_FORWARD, LOCAL) for row in table]


@pytest.mark.parametrize("element_bytes", ELEMENT_BYTES)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.kind)
def test_meter_finds_what_is_declared(row: Any, element_bytes: int) -> None:
    config = row.example(next(iter(row.examples)))
    found = list(pairs(config, element_bytes, fast=True))
    assert [pair for pair in found if pair[1] != pair[2]] == []
    assert len(found) >= 2


def main(kinds: list[str]) -> int:
    """Prints how many quantities of each mixer are equal and which differ."""
    total: Counter[bool] = Counter()
    for row in ROWS:
        if kinds and row.kind not in kinds:
            continue
        counts, start = Counter[bool](), time.monotonic()
        for name in row.examples:
            for element_bytes in ELEMENT_BYTES:
                for what, meter, wanted in pairs(row.example(name), element_bytes, fast=False):
                    counts[meter == wanted] += 1
                    if meter != wanted:
                        print(f"  {row.kind}/{name}, {element_bytes} bytes, {what}: meter {meter}, declared {wanted}")
        seconds = time.monotonic() - start
        print(f"{row.kind}: {counts[True]} equal, {counts[False]} differ; {seconds:.1f} s", flush=True)
        total += counts
    print(f"all: {total[True]} equal, {total[False]} differ")
    return int(total[False] > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
