"""Whether the mixers are right: a speed means nothing for one that is not."""

import dataclasses
import multiprocessing
import sys

import torch

from twoaxis import DEPTH, FEED_FORWARD, SEQUENCE
from twoaxis.testing import depth_checks, feed_forward_checks, run_checks, sequence_checks

CHECKED = {"depth": (DEPTH, depth_checks), "sequence": (SEQUENCE, sequence_checks), "feed": (FEED_FORWARD, feed_forward_checks)}


def all_mixers_are_right() -> bool:
    """Runs the quick checks on the first example of every mixer; where one fails, says so, and that no speed is printed."""
    mixers = [(axis, row.kind) for axis, (table, _) in CHECKED.items() for row in table]
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        red = sorted(kind for (_, kind), right in zip(mixers, pool.starmap(_is_right, mixers, 1), strict=True) if not right)
    if red:
        print(f"no speeds are printed: conformance is red for {', '.join(red)}; run `twoaxis check`", file=sys.stderr)
    return not red


def _is_right(axis: str, kind: str) -> bool:
    torch.set_num_threads(1)
    table, checks = CHECKED[axis]
    name, example = next(iter(table[kind].examples.items()))
    row = dataclasses.replace(table[kind], examples={name: example})
    return all(result.ok for result in run_checks([row], checks(), slow=False))
