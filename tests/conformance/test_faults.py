"""The suite itself is tested: every planted fault is caught, its twin passes, and every check catches something."""

from itertools import chain

import pytest

from twoaxis.testing import Check, CheckFailed, depth_checks, feed_forward_checks, local_checks, sequence_checks
from twoaxis.testing.faults import DEPTH_FAULTS, FEED_FORWARD_FAULTS, LOCAL_FAULTS, SEQUENCE_FAULTS, Fault

AXES = (
    (DEPTH_FAULTS, depth_checks()),
    (SEQUENCE_FAULTS, sequence_checks()),
    (FEED_FORWARD_FAULTS, feed_forward_checks()),
    (LOCAL_FAULTS, local_checks()),
)
CASES = [
    pytest.param(fault, check, id=f"{fault.name} - {check.name}")
    for faults, checks in AXES
    for fault in faults
    for check in checks
    if check.name in fault.caught_by
]


# torch.compile itself looks at such gradients when it goes on after a graph break.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(("fault", "check"), CASES)
def test_caught(fault: Fault, check: Check) -> None:
    with pytest.raises(fault.raises) as caught:
        check.run(fault.faulty)
    assert fault.raises is not CheckFailed or "\n" not in str(caught.value)
    check.run(fault.twin)


def test_named_checks_exist() -> None:
    for faults, checks in AXES:
        known = {check.name for check in checks}
        assert not set(chain.from_iterable(fault.caught_by for fault in faults)) - known


def test_every_check_catches_a_fault() -> None:
    named = set(chain.from_iterable(fault.caught_by for faults, _ in AXES for fault in faults))
    checks = {check.name for _, checks in AXES for check in checks}
    assert not checks - named
