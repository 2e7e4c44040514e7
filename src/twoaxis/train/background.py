"""Checkpoints that are written while training goes on."""

import threading
from collections.abc import Callable


class BackgroundWriter:
    """Runs one write at a time in a thread; an error of it is raised by the next call.

    Attributes:
        saved_step: of the newest checkpoint that is complete.
    """

    def __init__(self, saved_step: int) -> None:
        self.saved_step = saved_step
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, write: Callable[[], None], step: int) -> None:
        """Starts a write, when the one before has ended."""
        self.finish()

        def run() -> None:
            try:
                write()
                self.saved_step = step
            except BaseException as error:
                self._error = error

        # A run that is ended by force does not wait for it; what it leaves is a draft.
        self._thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self._thread.start()

    def run(self, write: Callable[[], None], step: int) -> None:
        """Writes at once."""
        self.finish()
        write()
        self.saved_step = step

    def finish(self) -> None:
        """Waits for the write that has begun.

        Raises:
            CheckpointError: it has failed.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
