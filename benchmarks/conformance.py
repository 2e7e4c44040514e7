"""Whether the mixers are right: a speed means nothing for one that is not."""

import sys

from twoaxis import DEPTH, FEED_FORWARD, SEQUENCE
from twoaxis.testing import depth_checks, feed_forward_checks, run_checks, sequence_checks


def all_mixers_are_right() -> bool:
    """Runs the quick conformance suite; where a mixer fails, says so, and that no speed is printed."""
    results = [
        *run_checks(DEPTH, depth_checks(), slow=False),
        *run_checks(SEQUENCE, sequence_checks(), slow=False),
        *run_checks(FEED_FORWARD, feed_forward_checks(), slow=False),
    ]
    red = sorted({result.kind for result in results if not result.ok})
    if red:
        print(f"no speeds are printed: conformance is red for {', '.join(red)}; run `twoaxis check`", file=sys.stderr)
    return not red
