"""The checks on examples of every feed-forward."""

import pytest

from twoaxis.feed_forward import FEED_FORWARD, FeedForwardConfig
from twoaxis.testing import Check, feed_forward_checks

from .matrix import cases


@pytest.mark.parametrize(("config", "check"), cases(FEED_FORWARD, feed_forward_checks()))
def test_conformance(config: FeedForwardConfig, check: Check) -> None:
    check.run(config)
