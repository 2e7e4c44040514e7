"""Continuous batching: requests join a running batch between two steps, and leave it at their end.

All mixers share one batch. A prompt runs alone, in pieces of fixed length, and once for neighbours in the queue that share it;
then its cache joins that of the batch behind padding (`model/cache.py`), which every mixer of both axes ignores. The
alternative, groups of requests that begin and end together, copies nothing, but leaves the batch slots of ended requests empty
and reads the weights once per group and step.

Cost: a request that joins or leaves copies the cache of the batch; in a step every row costs as much as the longest.

With `compile`, steps run on static caches (`model/static_cache.py`): a row has a place of its own, so that one that joins or
leaves copies at most its own cache and one other. There is one program for each number of rows and of tokens of a small set;
a step runs the next larger one, and places without a row compute what nobody reads. All are compiled before `start` returns.
Compiled beside a running batch they would take processor and interpreter from it for minutes, and until then steps would be
eager, at another speed. Prompts are read eagerly.

Exactness: prompts, samples and seeds never depend on other requests. In a step, the rounding of a matrix product may depend on
the number of rows, by some 1e-7 of a logit in float32, which changes a token only between two logits as close as that (or, when
sampling, for a draw as close to a boundary): not once in 12,000 tokens of five small models. With `max_batch=1` nothing depends
on other requests.

Letters: V vocabulary.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from twoaxis.core.errors import ConfigError, DataError, TwoAxisError, problem
from twoaxis.interop.serve.generation import (
    Batch,
    Ending,
    FixedRows,
    Generation,
    GenerationCallback,
    GrowingRows,
    RequestHandle,
    choose,
)
from twoaxis.model import Decoder
from twoaxis.model.generate import column_major_weights
from twoaxis.model.static_cache import check_compiler

_log = logging.getLogger(__name__)


class QueueFull(TwoAxisError):
    """The queue has no room for a request."""


class Stopped(TwoAxisError):
    """The engine accepts no more generations."""


@dataclass
class Counts:
    """Counts since the start of the engine.

    Attributes:
        steps: of the batch.
        row_steps: rows in all steps; `row_steps / steps` is the mean batch size.
        prompt_tokens: read.
        new_tokens: generated.
        faults: generations that ended in an error.
        programs: compiled for steps; with any, every step runs one of them.
    """

    steps: int = 0
    row_steps: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    faults: int = 0
    programs: int = 0


class Engine:
    """Runs the model in a thread; a context manager, or call `start` and `stop`.

    Args:
        model: in evaluation mode; its weights must not change or move while the engine runs.
        max_batch: the most generations that run at once.
        max_queue: the most generations that wait for a batch slot.
        prefill_tokens: prompts are read in pieces of this length, one such piece or several short prompts between two steps,
            so that a long prompt does not delay the others.
        max_tokens: of a prompt and its new tokens; None for as many as the model takes.
        compile: compile the step of the batch; `start` returns when all programs are there.
        note: receives lines about the compilation.

    Raises:
        ConfigError: a number below 1, or no compiler where one is needed.

    Example:
        >>> from twoaxis import DecoderConfig
        >>> class Printer:
        ...     def token(self, token): print("a token")
        ...     def end(self, ending): print(ending); done.set()
        >>> done = threading.Event()
        >>> with Engine(Decoder.build(DecoderConfig(vocab_size=8, d_model=8, n_layers=1))) as engine:
        ...     handles = engine.submit([(Generation([1, 2], max_new_tokens=2), Printer())])
        ...     finished = done.wait(60)
        a token
        a token
        length
    """

    def __init__(
        self,
        model: Decoder,
        max_batch: int = 16,
        max_queue: int = 64,
        prefill_tokens: int = 256,
        max_tokens: int | None = None,
        compile: bool = False,
        note: Callable[[str], None] = _log.info,
    ) -> None:
        longest = model.config.max_seq_len if max_tokens is None else min(max_tokens, model.config.max_seq_len)
        numbers = {"max_batch": max_batch, "max_queue": max_queue, "prefill_tokens": prefill_tokens, "max_tokens": longest}
        for name, value in numbers.items():
            if value < 1:
                raise ConfigError(problem(name, value, ">= 1", "leave it out for the default"))
        if compile:
            check_compiler(model.embedding.weight.device)
        self.max_batch, self.max_queue, self.prefill_tokens, self.max_tokens = max_batch, max_queue, prefill_tokens, longest
        self.counts = Counts()
        self._model, self._note = model, note
        self._compiled_rows = max_batch if compile else None
        rows = FixedRows(model, max_batch, max(2, longest)) if compile else GrowingRows(model)
        self._batch = Batch(model, rows)
        self._waiting: deque[RequestHandle] = deque()
        self._reading: RequestHandle | None = None
        self._slots_taken = 0
        self._changed = threading.Condition()
        self._stopping = False
        self._ready = threading.Event()
        self._not_started: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="twoaxis-engine", daemon=True)

    def __enter__(self) -> "Engine":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def alive(self) -> bool:
        """Whether it accepts generations."""
        return self._thread.is_alive() and not self._stopping

    @property
    def waiting(self) -> int:
        """Generations without a batch slot."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Generations with a batch slot."""
        return self._slots_taken

    def start(self) -> None:
        """Starts the thread; with `compile`, waits for all programs, and raises what prevents one."""
        self._thread.start()
        self._ready.wait()
        if self._not_started is not None:
            raise self._not_started

    def stop(self) -> None:
        """Ends every generation as `cancelled`, then the thread; it may be called again."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    def submit(self, generations: Sequence[tuple[Generation, GenerationCallback]]) -> list[RequestHandle]:
        """Queues all of these generations, or none of them.

        Raises:
            ConfigError: one has more tokens than `max_tokens`.
            QueueFull: there is no room for all of them.
            Stopped: the engine takes no more.
        """
        for generation, _ in generations:
            tokens = len(generation.prompt) + generation.max_new_tokens
            if tokens > self.max_tokens:
                allowed = f"at most max_tokens={self.max_tokens}"
                raise ConfigError(problem("prompt and new tokens", tokens, allowed, "shorten the prompt or ask for fewer"))
        handles = [RequestHandle(generation, callback) for generation, callback in generations]
        with self._changed:
            if not self.alive:
                raise Stopped("the server is stopping; ask again later")
            # Generations about to take a free batch slot do not count as waiting.
            free = self.max_batch - self._slots_taken
            if len(self._waiting) + len(handles) > self.max_queue + free:
                got = f"{max(0, len(self._waiting) - free)} of {self.max_queue} places taken"
                raise QueueFull(f"queue: {got}: must have room for {len(handles)} more; ask again later")
            self._waiting += handles
            self._changed.notify()
        return handles

    def _run(self) -> None:
        try:
            with column_major_weights(self._model, self._compiled_rows):
                if not self._prepare():
                    return
                while self._has_work():
                    self._drop_cancelled()
                    self._read_prompts()
                    self._step()
        finally:
            with self._changed:
                self._stopping = True
                left = [*self._batch.rows, *([self._reading] if self._reading else []), *self._waiting]
                self._waiting.clear()
                self._reading = None
                self._batch.clear()
            for handle in left:
                self._end(handle, "cancelled")

    def _prepare(self) -> bool:
        """Compiles the step for every number of rows and of tokens; `start` raises what prevents it."""
        began = time.monotonic()

        def done(rows: int, tokens: int, left: int) -> None:
            nonlocal began
            self.counts.programs += 1
            seconds, began = time.monotonic() - began, time.monotonic()
            self._note(f"step compiled for {rows} rows of {tokens} tokens in {seconds:.1f} s; programs left: {left}")

        try:
            self._batch.prepare(done)
        except Exception as error:
            self._not_started = error
        self._ready.set()
        return self._not_started is None

    def _has_work(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or self._waiting or self.running)
            return not self._stopping

    def _drop_cancelled(self) -> None:
        with self._changed:
            gone = [handle for handle in self._waiting if handle.cancelled]
            self._waiting = deque(handle for handle in self._waiting if not handle.cancelled)
        if self._reading is not None and self._reading.cancelled:
            gone.append(self._reading)
            self._reading = None
        for handle in gone:
            self._end(handle, "cancelled")
        self._leave(["cancelled" if handle.cancelled else None for handle in self._batch.rows])

    def _read_prompts(self) -> None:
        ready: list[RequestHandle] = []
        budget = self.prefill_tokens
        while budget > 0 and (handle := self._next_prompt()):
            # Pieces do not depend on other requests, and neither does their rounding.
            start = handle.read_tokens
            piece = handle.generation.prompt[start : start + self.prefill_tokens]
            budget -= len(piece)
            ready += self._read(handle, piece)
        if ready and self._guarded([*self._batch.rows, *ready], lambda: self._batch.join(ready)):
            self._give_up([*self._batch.rows, *ready])

    def _next_prompt(self) -> RequestHandle | None:
        """The prompt that is partly read, else the first in the queue if there is a batch slot for it."""
        with self._changed:
            if self._reading is None and self._waiting and self._slots_taken < self.max_batch:
                self._reading = self._admitted()
            return self._reading

    def _read(self, handle: RequestHandle, piece: Sequence[int]) -> list[RequestHandle]:
        """Reads a piece of a prompt; behind the last one, returns the generations that run on."""
        read: list[Tensor | None] = []
        if self._guarded([handle], lambda: read.append(self._batch.read(handle, piece))):
            self._reading = None
            self._end(handle, "error")
            return []
        self.counts.prompt_tokens += len(piece)
        if (logits := read[0]) is None:
            return []
        self._reading = None
        alike = [handle, *self._next_alike(handle)]
        for other in alike[1:]:
            other.cache, other.read_tokens = handle.cache, handle.read_tokens
        tokens: list[int | DataError] = []
        fault = self._guarded(alike, lambda: tokens.extend(choose(alike, logits.expand(len(alike), -1))))
        endings: list[Ending | None] = [fault for _ in alike]
        if fault is None:
            endings = [self._take(each, token) for each, token in zip(alike, tokens, strict=True)]
        for each, ending in zip(alike, endings, strict=True):
            if ending is not None:
                self._end(each, ending)
        return [each for each, ending in zip(alike, endings, strict=True) if ending is None]

    def _next_alike(self, handle: RequestHandle) -> list[RequestHandle]:
        """The next in the queue with the same prompt, such as other choices of its request, if there are batch slots."""
        found: list[RequestHandle] = []
        with self._changed:
            while self._waiting and self._slots_taken < self.max_batch:
                if self._waiting[0].generation.prompt != handle.generation.prompt:
                    break
                found.append(self._admitted())
        return found

    def _admitted(self) -> RequestHandle:
        """The first in the queue, which takes a batch slot; the caller holds the lock."""
        handle = self._waiting.popleft()
        handle.in_batch = True
        self._slots_taken += 1
        return handle

    def _step(self) -> None:
        rows = self._batch.rows
        if not rows:
            return
        found: list[int | DataError] = []
        if self._guarded(rows, lambda: found.extend(choose(rows, self._batch.step()))):
            self._give_up(rows)
            return
        self.counts.steps += 1
        self.counts.row_steps += len(rows)
        self._leave([self._take(handle, token) for handle, token in zip(rows, found, strict=True)])

    def _take(self, handle: RequestHandle, token: int | DataError) -> Ending | None:
        def act() -> Ending | None:
            if isinstance(token, DataError):
                raise token
            return handle.take(token)

        before = handle.new_tokens
        ending = self._guarded([handle], act)
        self.counts.new_tokens += handle.new_tokens - before
        return ending

    def _leave(self, endings: Sequence[Ending | None]) -> None:
        """Removes the rows with an ending."""
        if not any(endings):
            return
        rows = self._batch.rows
        kept = [row for row, ending in enumerate(endings) if ending is None]
        fault = self._guarded([rows[row] for row in kept], lambda: self._batch.keep(kept))
        for handle, ending in zip(rows, endings, strict=True):
            if ending is not None:
                self._end(handle, ending)
        if fault:
            self._give_up([rows[row] for row in kept])

    def _give_up(self, handles: Sequence[RequestHandle]) -> None:
        """Ends these generations after a fault and clears the batch."""
        self._batch.clear()
        for handle in handles:
            self._end(handle, "error")

    def _guarded(self, handles: Sequence[RequestHandle], act: Callable[[], Ending | None]) -> Ending | None:
        """Calls `act`; an error in it, such as too little memory, ends only these generations."""
        try:
            return act()
        except Exception:
            _log.exception("%d generations end in an error", len(handles))
            self.counts.faults += len(handles)
            return "error"

    def _end(self, handle: RequestHandle, ending: Ending) -> None:
        # The handle may still be referenced.
        handle.cache = None
        with self._changed:
            self._slots_taken -= handle.in_batch
            handle.in_batch = False
        try:
            handle.callback.end(ending)
        except Exception:
            _log.exception("a callback failed at the ending %s", ending)
