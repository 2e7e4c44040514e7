"""Planted faults: mixers with one fault each and a correct twin, which show that every check can fail."""

from twoaxis.testing.conformance import Fault
from twoaxis.testing.faults.depth import DEPTH_FAULTS
from twoaxis.testing.faults.local import FEED_FORWARD_FAULTS, LOCAL_FAULTS
from twoaxis.testing.faults.sequence import SEQUENCE_FAULTS

__all__ = ["DEPTH_FAULTS", "FEED_FORWARD_FAULTS", "LOCAL_FAULTS", "SEQUENCE_FAULTS", "Fault"]
