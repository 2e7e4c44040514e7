"""Every check on every example of every feed-forward."""

import pytest

from twoaxis.feed_forward import FEED_FORWARD, FeedForwardConfig
from twoaxis.testing import Check, feed_forward_checks

CASES = [
    pytest.param(row.example(example), check, id=f"{row.kind}-{example}-{check.name}")
    for row in FEED_FORWARD
    for index, example in enumerate(row.examples)
    for check in feed_forward_checks()
    # tests/distributed runs it, with one pair of processes.
    if check.name != "sharded_equals_whole" and (index == 0 or not check.slow)
]


@pytest.mark.parametrize(("config", "check"), CASES)
def test_conformance(config: FeedForwardConfig, check: Check) -> None:
    check.run(config)
