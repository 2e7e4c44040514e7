"""SIGTERM as an interrupt, so that whatever a process writes is tidied up as after Ctrl-C."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def termination_as_interrupt() -> Iterator[None]:
    """Raises KeyboardInterrupt on SIGTERM while the block runs; nothing outside the main thread, where Python cannot."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        del number, frame
        raise KeyboardInterrupt

    def raise_again(lost: "sys.UnraisableHookArgs") -> None:
        # An interrupt that arrives in a finaliser ends nothing but that; a moment later it arrives elsewhere.
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
