"""Whether the mixers are right: a speed means nothing for one that is not."""

from twoaxis import DEPTH, FEED_FORWARD, SEQUENCE
from twoaxis.testing import depth_checks, feed_forward_checks, run_checks, sequence_checks


def red_mixers() -> list[str]:
    """The mixers that fail a check of the quick conformance suite."""
    results = [
        *run_checks(DEPTH, depth_checks(), slow=False),
        *run_checks(SEQUENCE, sequence_checks(), slow=False),
        *run_checks(FEED_FORWARD, feed_forward_checks(), slow=False),
    ]
    return sorted({result.kind for result in results if not result.ok})
