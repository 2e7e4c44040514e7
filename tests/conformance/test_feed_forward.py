"""Every check on every example of every feed-forward."""

import pytest

from twoaxis.feed_forward import FEED_FORWARD, FeedForwardConfig
from twoaxis.testing import Check, feed_forward_checks
from twoaxis.testing.sharded import ON_TWO_RANKS

CASES = [
    pytest.param(row.example(example), check, id=f"{row.kind}-{example}-{check.name}")
    for row in FEED_FORWARD
    for index, example in enumerate(row.examples)
    for check in feed_forward_checks()
    # tests/distributed runs these, with one pair of processes.
    if check not in ON_TWO_RANKS and (index == 0 or not check.slow)
]


@pytest.mark.parametrize(("config", "check"), CASES)
def test_conformance(config: FeedForwardConfig, check: Check) -> None:
    check.run(config)
