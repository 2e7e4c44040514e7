"""Planted faults: mixers that are wrong in one way each, next to a right twin, to show that every check can fail."""

from twoaxis.testing.faults.depth import DEPTH_FAULTS
from twoaxis.testing.faults.fault import Fault
from twoaxis.testing.faults.local import FEED_FORWARD_FAULTS, LOCAL_FAULTS
from twoaxis.testing.faults.sequence import SEQUENCE_FAULTS

__all__ = ["DEPTH_FAULTS", "FEED_FORWARD_FAULTS", "LOCAL_FAULTS", "SEQUENCE_FAULTS", "Fault"]
