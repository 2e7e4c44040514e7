"""A process that measures one item after another for a parent that can end it.

A kernel that reads out of bounds spoils its process for good, and one that never returns cannot be interrupted. So the parent
measures nothing itself: it asks, waits for a limited time, and starts another process where one was lost.
"""

import gc
import importlib
import multiprocessing
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.gpu.settings import Items, Row, Settings

LONGEST_MESSAGE = 300

START_SECONDS = 60.0
"""How long a process may take to start."""

LEAVE_SECONDS = 5.0
"""How long a process that is not needed any more may take to leave."""


class ItemFailed(Exception):
    """An item that gave no result, in one line."""


class Worker:
    """The parent's side; the process starts with the first question.

    Args:
        settings: for all stages.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._process: Any = None
        self._connection: Any = None

    def names(self, module: str, limit_seconds: float) -> list[str]:
        """The items of a stage, in order; arguments and errors as of `measure`."""
        return self._ask((module, None), limit_seconds)

    def measure(self, module: str, item: str, limit_seconds: float) -> list[Row]:
        """The rows of one item.

        Args:
            module: of the stage, with a function `items(settings)`.
            item: one of its names.
            limit_seconds: after which the process is ended.

        Raises:
            ItemFailed: an error, a process that died, or one that took too long.
        """
        return self._ask((module, item), limit_seconds)

    def stop(self) -> None:
        """Ends the process, if there is one, and frees what it held on the device."""
        if self._process is not None:
            # One that waits for a question leaves by itself when nobody can ask any more.
            self._connection.close()
            self._end(LEAVE_SECONDS)

    def _end(self, patience_seconds: float = 0.0) -> int:
        """Ends the process, at once or if it does not leave by itself, and returns its exit code."""
        process, connection = self._process, self._connection
        self._process = self._connection = None
        process.join(patience_seconds)
        process.kill()
        process.join()
        connection.close()
        return process.exitcode

    def _ask(self, question: tuple[str, str | None], limit_seconds: float) -> Any:
        try:
            if self._process is None:
                self._start()
            self._connection.send(question)
            if not self._connection.poll(max(0.0, limit_seconds)):
                self._end()
                raise ItemFailed(f"took more than {limit_seconds:.0f} s and was ended")
            answer, error, usable = self._connection.recv()
        except (EOFError, OSError):
            raise ItemFailed(f"its process ended with exit code {self._end(LEAVE_SECONDS)}") from None
        if not usable:
            self.stop()
        if error:
            raise ItemFailed(error)
        return answer

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, far = context.Pipe()
        self._process = context.Process(target=_serve, args=(far, self.settings))
        self._process.start()
        far.close()
        # Its start is no part of what an item takes.
        if not self._connection.poll(START_SECONDS):
            self._end()
            raise ItemFailed(f"its process did not start within {START_SECONDS:.0f} s")
        self._connection.recv()


def _serve(connection: Connection, settings: Settings) -> None:
    """Answers (module, item) with (rows, error, whether the device still works) until the parent is gone."""
    stages: dict[str, Items] = {}
    if settings.size == "small":
        _compile_nothing()
    connection.send(None)
    with suppress(EOFError, OSError, KeyboardInterrupt):
        while True:
            module, item = connection.recv()
            try:
                if module not in stages:
                    stages[module] = importlib.import_module(module).items(settings)
                    # Behind every item, garbage is searched for in what is new alone.
                    gc.freeze()
                answer, error = (list(stages[module]) if item is None else stages[module][item]()), ""
            except Exception as failure:
                answer, error = None, one_line(failure)
            connection.send((answer, error, _cleared(settings)))


def _compile_nothing() -> None:
    import torch

    torch.compiler.set_stance("force_eager")


def _cleared(settings: Settings) -> bool:
    """Gives memory back, and tells whether the device still answers."""
    gc.collect()
    if not settings.on_gpu:
        return True
    import torch

    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError:
        return False
    return True


def one_line(failure: BaseException) -> str:
    """The kind of an error and its words in one line, cut where they are many."""
    return f"{type(failure).__name__}: {' '.join(str(failure).split())}"[:LONGEST_MESSAGE]
