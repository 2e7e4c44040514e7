"""The plain decoder against other libraries: time and peak memory of a training step, eager and compiled."""

import functools
from collections.abc import Callable

from benchmarks import models
from benchmarks.bounds import Bound
from benchmarks.measure import interleave, peak_memory, table
from benchmarks.peers import BUILDERS, PeerShape, peers, training_step

SHAPE = PeerShape()


def run(rounds: int) -> list[Bound]:
    """Prints both tables and returns a bound per peer."""
    tokens = SHAPE.tokens()
    ours = models.decoder(SHAPE)
    others = peers(SHAPE)
    print(f"### Training step, {SHAPE}, forward and backward\n")
    eager: dict[str, Callable[[], object]] = {"twoaxis": models.loss_step(ours, tokens)}
    eager |= {peer.name: functools.partial(peer.loss_step, tokens) for peer in others}
    timings = interleave(eager, rounds=rounds)
    print(table(timings, tokens[:, 1:].numel()), "\n")
    bounds = [Bound(f"training step, {t.name} / twoaxis, eager", t.ratio, 1.0, "at least") for t in timings[1:]]
    compiled: dict[str, Callable[[], object]] = {"twoaxis compiled": models.compiled_step(ours, tokens)}
    compiled |= {f"{peer.name} compiled": functools.partial(peer.compiled().loss_step, tokens) for peer in others}
    timings = interleave(compiled, rounds=rounds, warmup=3)
    print(table(timings, tokens[:, 1:].numel()), "\n")
    bounds += [Bound(f"training step, {t.name} / twoaxis compiled", t.ratio, 1.0, "at least") for t in timings[1:]]
    return bounds + _memory([peer.name for peer in others])


def _memory(names: list[str]) -> list[Bound]:
    print("| candidate | peak MiB of two steps beyond the built model |\n|---|---|")
    own = peak_memory(functools.partial(models.training_step, SHAPE)).step_bytes
    print(f"| twoaxis | {own / 2**20:.0f} |")
    bounds = []
    for name in (name for name in BUILDERS if name in names):
        other = peak_memory(functools.partial(training_step, name, SHAPE)).step_bytes
        print(f"| {name} | {other / 2**20:.0f} |")
        bounds.append(Bound(f"peak memory, twoaxis / {name}", own / other, 1.0))
    print()
    return bounds
