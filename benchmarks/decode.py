"""Cached greedy decoding of 128 tokens after a prompt of 128, against other libraries, as it is and compiled."""

import functools
from collections.abc import Callable

from benchmarks import models
from benchmarks.bounds import Bound
from benchmarks.measure import interleave, table
from benchmarks.peers import PeerShape, peers
from twoaxis import generate

SHAPE = PeerShape()
NEW_TOKENS = 128

COMPILED = ", compiled"

LEAST = {"transformers": 2.0, f"transformers{COMPILED}": 1.2}
"""Times of others over that of our compiled step; those of no entry are not to be faster."""


def run(rounds: int) -> list[Bound]:
    """Prints a table per batch size and returns the bounds."""
    bounds = []
    ours, others = models.decoder(SHAPE), peers(SHAPE)
    for batch in (1, 8):
        prompts = SHAPE.tokens(seed=1).repeat(2, 1)[:batch, :128].contiguous()
        rows = prompts.tolist()
        if generate(ours, rows, NEW_TOKENS, compile=True) != generate(ours, rows, NEW_TOKENS):
            raise AssertionError(f"batch {batch}: compiled steps choose other tokens than eager ones")
        candidates: dict[str, Callable[[], object]] = {
            f"twoaxis{COMPILED}": functools.partial(generate, ours, rows, NEW_TOKENS, compile=True),
            "twoaxis": functools.partial(generate, ours, rows, NEW_TOKENS),
        }
        for peer in others:
            candidates[peer.name] = functools.partial(peer.decode, prompts, NEW_TOKENS)
            if peer.decode_compiled is not None:
                candidates[peer.name + COMPILED] = functools.partial(peer.decode_compiled, prompts, NEW_TOKENS)
        print(f"### Greedy decoding, prompt 128, new {NEW_TOKENS}, batch {batch}, prefill included\n")
        timings = interleave(candidates, rounds=rounds, warmup=1)
        print(table(timings, batch * NEW_TOKENS), "\n")
        bounds += [
            Bound(f"decode batch {batch}, {t.name} / twoaxis{COMPILED}", t.ratio, LEAST.get(t.name, 1.0), "at least")
            for t in timings[2:]
        ]
    return bounds
