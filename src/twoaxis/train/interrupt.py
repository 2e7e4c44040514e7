"""Stopping a run with a signal: the first one lets the step end, a second one stops at once."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """Whether a signal has asked the run to stop.

    Attributes:
        name: the signal, such as SIGTERM; "" while there was none.
    """

    name = ""

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Handles one signal.

        Raises:
            KeyboardInterrupt: it is the second one.
        """
        del frame
        if self.name:
            raise KeyboardInterrupt
        self.name = signal.Signals(number).name


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Collects SIGINT and SIGTERM while the block runs; outside the main thread, where Python cannot, it does nothing."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.signal(number, request.receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
