"""The plain decoder against other libraries: time and peak memory of a training step, eager and compiled."""

import functools
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from benchmarks import models
from benchmarks.bounds import Bound, fastest_over_ours
from benchmarks.measure import interleave, peak_memory, table
from benchmarks.peers import BUILDERS, PeerShape, peers, training_step
from benchmarks.profiles import by_operation, is_product

SHAPE = PeerShape()


def run(rounds: int) -> list[Bound]:
    """Prints both tables, the profile and the memory, and returns the bounds."""
    tokens = SHAPE.tokens()
    ours = models.decoder(SHAPE)
    others = peers(SHAPE)
    print(f"### Training step, {SHAPE}, forward and backward\n")
    eager: dict[str, Callable[[], object]] = {"twoaxis": models.loss_step(ours, tokens)}
    eager |= {peer.name: functools.partial(peer.loss_step, tokens) for peer in others}
    first, *timings = interleave(eager, rounds=rounds)
    print(table([first, *timings], tokens[:, 1:].numel()), "\n")
    bounds = fastest_over_ours("training step, eager, best other / twoaxis", first, timings, 1.05)
    bounds.append(_outside_products(eager["twoaxis"]))
    compiled: dict[str, Callable[[], object]] = {"twoaxis compiled": models.compiled_step(ours, tokens)}
    compiled |= {f"{peer.name} compiled": functools.partial(peer.compiled().loss_step, tokens) for peer in others}
    first, *timings = interleave(compiled, rounds=rounds, warmup=3)
    print(table([first, *timings], tokens[:, 1:].numel()), "\n")
    bounds += fastest_over_ours("training step, compiled, best other / twoaxis", first, timings, 1.0)
    return bounds + _memory([peer.name for peer in others])


def _outside_products(step: Callable[[], object]) -> Bound:
    """The part of the eager step that is neither a matrix product nor attention, by a profile of it."""
    spent = by_operation(step)
    total = sum(spent.values())
    others = Counter({name: seconds for name, seconds in spent.items() if not is_product(name)})
    print("| operation of the eager step | part of its time |\n|---|---|")
    print(f"| matrix products and attention | {1 - sum(others.values()) / total:.3f} |")
    for name, seconds in others.most_common(8):
        print(f"| {name} | {seconds / total:.3f} |")
    print()
    return Bound("eager step outside matrix products and attention", sum(others.values()) / total, 0.08, unit="of its time")


def _memory(names: list[str]) -> list[Bound]:
    steps = {"twoaxis": functools.partial(models.training_step, SHAPE)}
    steps |= {name: functools.partial(training_step, name, SHAPE) for name in BUILDERS if name in names}
    # Two at a time, since none is timed.
    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(steps, pool.map(lambda step: peak_memory(step).step_bytes / 2**20, steps.values()), strict=True))
    print("| candidate | peak MiB of two steps beyond the built model |\n|---|---|")
    print("".join(f"| {name} | {size:.0f} |\n" for name, size in found.items()))
    own = found.pop("twoaxis")
    if not found:
        return []
    best = min(found, key=found.__getitem__)
    what = "peak memory of a training step, twoaxis / best other"
    return [Bound(what, own / found[best], 1.0, ours=f"{own:.0f} MiB", other=f"{best} {found[best]:.0f} MiB")]
