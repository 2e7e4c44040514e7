"""Signals: SIGTERM as KeyboardInterrupt, and requests to stop a run after its step."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def termination_as_interrupt() -> Iterator[None]:
    """Raises KeyboardInterrupt on SIGTERM while the block runs; only in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        del number, frame
        raise KeyboardInterrupt

    def raise_again(lost: "sys.UnraisableHookArgs") -> None:
        # An interrupt in a finaliser is lost, so it is sent again a moment later.
        if issubclass(lost.exc_type, KeyboardInterrupt):
            timer = threading.Timer(0.01, send)
            timer.daemon = True
            timer.start()
        else:
            hook(lost)

    def send() -> None:
        with ending:
            if signal.getsignal(signal.SIGTERM) is interrupt:
                os.kill(os.getpid(), signal.SIGTERM)

    ending = threading.Lock()
    hook, before = sys.unraisablehook, signal.signal(signal.SIGTERM, interrupt)
    sys.unraisablehook = raise_again
    try:
        yield
    finally:
        sys.unraisablehook = hook
        with ending:
            signal.signal(signal.SIGTERM, before)


class StopRequest:
    """A request to stop a run; `name` is the signal, such as SIGTERM, or "" without one.

    Args:
        repeats: whether one signal may come twice, as from a launcher and a scheduler; then only SIGINT forces.
    """

    name = ""

    def __init__(self, repeats: bool = False) -> None:
        self._repeats = repeats

    @property
    def number(self) -> int:
        """The number of the signal, 0 without one."""
        return signal.Signals[self.name].value if self.name else 0

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Handles one signal.

        Raises:
            KeyboardInterrupt: at the second signal.
        """
        del frame
        if self.name and (number == signal.SIGINT or not self._repeats):
            raise KeyboardInterrupt
        self.name = signal.Signals(number).name


@contextmanager
def stop_on_signals(repeats: bool = False) -> Iterator[StopRequest]:
    """Collects SIGINT and SIGTERM while the block runs; only in the main thread.

    Args:
        repeats: see `StopRequest`.
    """
    request = StopRequest(repeats)
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.signal(number, request.receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
