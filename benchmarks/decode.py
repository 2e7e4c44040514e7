"""Cached greedy decoding of 128 tokens after a prompt of 128, against other libraries."""

import functools
from collections.abc import Callable

from benchmarks import models
from benchmarks.bounds import Bound
from benchmarks.measure import interleave, table
from benchmarks.peers import PeerShape, peers
from twoaxis import generate

SHAPE = PeerShape()
NEW_TOKENS = 128


def run(rounds: int) -> list[Bound]:
    """Prints a table per batch size and returns the bound against transformers."""
    bounds = []
    ours, others = models.decoder(SHAPE), peers(SHAPE)
    for batch in (1, 8):
        prompts = SHAPE.tokens(seed=1).repeat(2, 1)[:batch, :128].contiguous()
        candidates: dict[str, Callable[[], object]] = {
            "twoaxis": functools.partial(generate, ours, prompts.tolist(), NEW_TOKENS)
        }
        candidates |= {peer.name: functools.partial(peer.decode, prompts, NEW_TOKENS) for peer in others}
        print(f"### Greedy decoding, prompt 128, new {NEW_TOKENS}, batch {batch}, prefill included\n")
        timings = interleave(candidates, rounds=rounds, warmup=1)
        print(table(timings, batch * NEW_TOKENS), "\n")
        bounds += [
            Bound(f"decode batch {batch}, {t.name} / twoaxis", t.ratio, 2.0 if t.name == "transformers" else 1.0, "at least")
            for t in timings[1:]
        ]
    return bounds
