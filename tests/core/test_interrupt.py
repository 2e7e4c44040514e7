"""SIGTERM ends a block as Ctrl-C does, wherever it arrives."""

import os
import signal

import pytest

from twoaxis.core.interrupt import StopRequest, termination_as_interrupt


class Finalised:
    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_termination_is_an_interrupt_and_the_handler_of_before_comes_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), termination_as_interrupt():
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before


def test_an_interrupt_in_a_finaliser_is_not_lost() -> None:
    """Catches a termination that Python swallows, with a trace, because it has arrived in a finaliser."""
    with pytest.raises(KeyboardInterrupt), termination_as_interrupt():
        found = Finalised()
        del found
        signal.pause()


def test_a_repeated_termination_does_not_force_a_run_of_several_processes() -> None:
    patient, alone = StopRequest(repeats=True), StopRequest()
    for request in (patient, alone):
        request.receive(signal.SIGTERM, None)
    patient.receive(signal.SIGTERM, None)
    with pytest.raises(KeyboardInterrupt):
        alone.receive(signal.SIGTERM, None)
    with pytest.raises(KeyboardInterrupt):
        patient.receive(signal.SIGINT, None)
