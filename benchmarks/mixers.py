"""What each depth mixer adds to a training step, and to its memory."""

import functools
from collections.abc import Callable
from typing import Any

from benchmarks import models
from benchmarks.bounds import Bound
from benchmarks.measure import interleave, peak_memory, table
from benchmarks.peers import PeerShape

SHAPE = PeerShape()
CANDIDATES: dict[str, tuple[Any, float | None]] = {
    "residual": ("residual", None),
    "residual_scalars": ("residual_scalars", None),
    "attention_residuals full": ("attention_residuals", 1.25),
    "attention_residuals block 4": ({"kind": "attention_residuals", "block_size": 4}, 1.10),
    "deep_delta": ("deep_delta", 1.05),
    "deep_delta paper": ({"kind": "deep_delta", "value_target": "paper"}, 1.05),
}


def run(rounds: int) -> list[Bound]:
    """Prints the eager and compiled tables and returns the bounds."""
    tokens = SHAPE.tokens()
    steps: dict[str, Callable[[], object]] = {}
    for name, (depth, _) in CANDIDATES.items():
        steps[name] = models.loss_step(models.decoder(SHAPE, depth), tokens)
    print(f"### Depth mixers, training step, {SHAPE}, eager\n")
    timings = interleave(steps, rounds=rounds)
    print(table(timings, tokens[:, 1:].numel()), "\n")
    bounds = []
    for timing in timings:
        limit = CANDIDATES[timing.name][1]
        if limit is not None:
            bounds.append(Bound(f"training step, {timing.name} / residual", timing.ratio, limit))
    print("| depth mixer | peak MiB of two steps beyond the built model |\n|---|---|")
    for name, (depth, _) in CANDIDATES.items():
        used = peak_memory(functools.partial(models.training_step, SHAPE, depth)).step_bytes
        print(f"| {name} | {used / 2**20:.0f} |")
    print()
    return bounds
