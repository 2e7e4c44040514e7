"""Cached greedy decoding of 128 tokens after a prompt of 128, against other libraries, as it is and compiled."""

import functools
from collections import Counter
from collections.abc import Callable

from benchmarks import models
from benchmarks.bounds import Bound, fastest_over_ours
from benchmarks.measure import bytes_per_second, interleave, table
from benchmarks.peers import Peer, PeerShape, peers
from benchmarks.profiles import by_operation, is_product
from twoaxis import Decoder, generate

SHAPE = PeerShape()
NEW_TOKENS = 128

COMPILED = ", compiled"

LEAST = {"transformers": 2.0, f"transformers{COMPILED}": 1.2}
"""Times of others over that of our compiled step; those of no entry are not to be faster."""


def run(rounds: int) -> list[Bound]:
    """Prints a table per batch size, and one of reading prompts, and returns the bounds."""
    ours, others = models.decoder(SHAPE), peers(SHAPE)
    return [*_decoding(ours, others, 1, rounds), *_decoding(ours, others, 8, rounds), *_prefill(ours, others, rounds)]


def _decoding(ours: Decoder, others: list[Peer], batch: int, rounds: int) -> list[Bound]:
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
    first, *timings = interleave(candidates, rounds=rounds, warmup=1)
    print(table([first, *timings], batch * NEW_TOKENS), "\n")
    named = [timing for timing in timings if timing.name in LEAST]
    rest = [timing for timing in timings[1:] if timing.name not in LEAST]
    what = f"decode batch {batch}"
    bounds = [
        *(one for t in named for one in fastest_over_ours(f"{what}, {t.name} / twoaxis{COMPILED}", first, [t], LEAST[t.name])),
        *fastest_over_ours(f"{what}, best of the rest / twoaxis{COMPILED}", first, rest, 1.0),
    ]
    if not all(bound.kept for bound in bounds):
        limit = sum(parameter.nbytes for parameter in ours.parameters()) * NEW_TOKENS / bytes_per_second()
        read = f"all weights are read from memory for each of {NEW_TOKENS} tokens"
        _print_missed(by_operation(candidates[first.name]), read, limit)
    return bounds


def _print_missed(spent: Counter[str], what: str, limit: float) -> None:
    """Where the time of a missed bound goes, and what it cannot do without."""
    print(f"| what of {sum(spent.values()) * 1e3:.0f} ms | ms |\n|---|---|")
    print(f"| limit: {what} | {limit * 1e3:.0f} |")
    print("".join(f"| {name} | {seconds * 1e3:.0f} |\n" for name, seconds in spent.most_common(8)))


def _prefill(ours: Decoder, others: list[Peer], rounds: int) -> list[Bound]:
    """The first token behind prompts of 384, which is what reading them takes."""
    prompts = SHAPE.tokens(seed=1)[:, :384].contiguous()
    candidates: dict[str, Callable[[], object]] = {"twoaxis": functools.partial(generate, ours, prompts.tolist(), 1)}
    candidates |= {peer.name: functools.partial(peer.decode, prompts, 1) for peer in others}
    print(f"### Prompts of 384 tokens, batch {len(prompts)}, and the first token behind\n")
    first, *timings = interleave(candidates, rounds=rounds)
    print(table([first, *timings], prompts.numel()), "\n")
    bounds = fastest_over_ours("prefill, best other / twoaxis", first, timings, 1.0)
    if not all(bound.kept for bound in bounds):
        spent = by_operation(candidates["twoaxis"])
        limit = sum(seconds for name, seconds in spent.items() if is_product(name))
        _print_missed(spent, "matrix products and attention, which all of them call", limit)
    return bounds
