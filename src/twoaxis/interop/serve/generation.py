"""One generation, from its request to its last token, and the batch of running generations with their caches.

Letters: B rows, T tokens, D width, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from twoaxis.core.errors import DataError
from twoaxis.model import Decoder, DecoderCache
from twoaxis.model.cache import join_rows, keep_rows
from twoaxis.model.generate import GREEDY, Sampling
from twoaxis.model.static_cache import StaticRows, full_cache, rooms

ROWS_FACTOR = 4
"""From one number of rows of a compiled step to the next: few programs, each for at most so many times the rows that run."""

Ending = Literal["stop", "length", "cancelled", "error"]


class GenerationCallback(Protocol):
    """Receives the new tokens of one generation, in the thread of the model: it must be fast and must not block."""

    def token(self, token: int) -> bool:
        """Receives the next token; returns whether the generation ends with it."""
        ...

    def end(self, ending: Ending) -> None:
        """Receives the ending; the last call."""
        ...


@dataclass(frozen=True)
class Generation:
    """A request for at least one new token after a prompt of at least one token.

    It ends before any of the stop tokens. Only ids below `vocab_size` are chosen; None allows all.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    sampling: Sampling = GREEDY
    stop_tokens: frozenset[int] = frozenset()
    vocab_size: int | None = None


@dataclass(eq=False)
class RequestHandle:
    """A submitted generation and its progress.

    Attributes:
        generation: the request.
        callback: receives its tokens.
        generator: the random generator of this generation.
        cancelled: set from any thread.
        in_batch: whether it has a batch slot.
        cache: while the prompt is being read.
        read_tokens: of the prompt, so far.
        new_tokens: so far.
        last: the newest token.
    """

    generation: Generation
    callback: GenerationCallback
    generator: torch.Generator = field(init=False)
    cancelled: bool = False
    in_batch: bool = False
    cache: DecoderCache | None = None
    read_tokens: int = 0
    new_tokens: int = 0
    last: int = -1

    def __post_init__(self) -> None:
        self.generator = self.generation.sampling.generator()

    def cancel(self) -> None:
        """Ends the generation before the next step as `cancelled`."""
        self.cancelled = True

    @property
    def options(self) -> tuple[object, ...]:
        """All that its choice of tokens depends on, the generator aside."""
        sampling = self.generation.sampling
        return sampling.temperature, sampling.top_k, sampling.top_p, self.generation.vocab_size

    def take(self, token: int) -> Ending | None:
        """Calls the callback with the next token; returns the ending after the last token."""
        if token in self.generation.stop_tokens:
            return "stop"
        self.new_tokens, self.last = self.new_tokens + 1, token
        if self.callback.token(token):
            return "stop"
        return "length" if self.new_tokens == self.generation.max_new_tokens else None


def choose(handles: Sequence[RequestHandle], logits: Float[Tensor, "B V"]) -> list[int | DataError]:
    """The next token of each row, or why there is none; rows with the same options are chosen together, to the same bit."""
    found: list[int | DataError] = [0] * len(handles)
    alike: dict[object, list[int]] = {}
    for row, handle in enumerate(handles):
        alike.setdefault(handle.options, []).append(row)
    for rows in alike.values():
        generation = handles[rows[0]].generation
        of_rows = logits if len(rows) == len(handles) else logits[rows]
        generators = [handles[row].generator for row in rows]
        try:
            tokens = generation.sampling.choose(of_rows[:, : generation.vocab_size], generators).tolist()
        except DataError as error:
            # Nothing has been drawn yet.
            tokens = [error] if len(rows) == 1 else [choose([handles[row]], logits[row : row + 1])[0] for row in rows]
        for row, token in zip(rows, tokens, strict=True):
            found[row] = token
    return found


class Rows(Protocol):
    """The caches of some rows, in an order."""

    def prepare(self, done: Callable[[int, int, int], None]) -> None:
        """Compiles the step for every size; calls `done` with the rows and the tokens of each, and how many are left."""
        ...

    def clear(self) -> None:
        """Removes all rows."""
        ...

    def join(self, caches: Sequence[DecoderCache]) -> None:
        """Adds rows at the end, a cache of one row each."""
        ...

    def keep(self, rows: Sequence[int]) -> Sequence[int]:
        """Removes all other rows; returns these in the order that they now have."""
        ...

    def hidden(self, tokens: Sequence[int]) -> Float[Tensor, "B 1 D"]:
        """The outputs of the stack for the next token of every row."""
        ...


class GrowingRows:
    """One cache that grows: a row that comes or goes copies all rows, and each costs as much as the longest."""

    def __init__(self, model: Decoder) -> None:
        self._model = model
        self._device = model.embedding.weight.device
        self._cache: DecoderCache | None = None

    def prepare(self, done: Callable[[int, int, int], None]) -> None:
        """Nothing is compiled."""

    def clear(self) -> None:
        """Frees the cache."""
        self._cache = None

    @torch.inference_mode()
    def join(self, caches: Sequence[DecoderCache]) -> None:
        """Joins the caches behind padding."""
        self._cache = join_rows([*([] if self._cache is None else [self._cache]), *caches])

    @torch.inference_mode()
    def keep(self, rows: Sequence[int]) -> Sequence[int]:
        """Selects rows in their order."""
        assert self._cache is not None
        self._cache = keep_rows(self._cache, torch.tensor(rows, device=self._device)) if rows else None
        return rows

    @torch.inference_mode()
    def hidden(self, tokens: Sequence[int]) -> Float[Tensor, "B 1 D"]:
        """Runs the model."""
        assert self._cache is not None
        given = torch.tensor(tokens, device=self._device)[:, None]
        hidden, self._cache = self._model.hidden(self._model.embed(given), None, self._cache, tokens=given)
        return hidden


class FixedRows:
    """Static caches: a row that comes or goes copies itself or one other; steps run as many rows as the next size has.

    Args:
        model: the decoder.
        most: rows at once.
        tokens: of the longest row, at least 2.
        compile: whether the step is compiled; else it runs as it is, the reference.
    """

    def __init__(self, model: Decoder, most: int, tokens: int, compile: bool = True) -> None:
        counts = [1]
        while counts[-1] < most:
            counts.append(min(most, ROWS_FACTOR * counts[-1]))
        with torch.no_grad():
            like = full_cache(model, tokens)
            self._static = StaticRows(model, like, counts, rooms(like, tokens), compile)
        self._device = model.embedding.weight.device
        self._positions: list[int] = []

    def prepare(self, done: Callable[[int, int, int], None]) -> None:
        """Runs a step of every size."""
        left = len(self._static.counts) * len(self._static.rooms)
        with torch.no_grad():
            for rows, tokens in self._static.programs():
                left -= 1
                done(rows, tokens, left)

    def clear(self) -> None:
        """Gives all places free, as they are."""
        self._positions = []

    @torch.no_grad()
    def join(self, caches: Sequence[DecoderCache]) -> None:
        """Copies each cache to the next place."""
        lasts = [_last(cache) for cache in caches]
        self._fit([*self._positions, *lasts])
        for cache, last in zip(caches, lasts, strict=True):
            self._static.put(len(self._positions), cache)
            self._positions.append(last)

    @torch.no_grad()
    def keep(self, rows: Sequence[int]) -> Sequence[int]:
        """Moves rows from the end to the places of those that leave."""
        stay, places = set(rows), range(len(rows))
        from_the_end = (row for row in rows if row not in places)
        order = [place if place in stay else next(from_the_end) for place in places]
        for place, row in enumerate(order):
            if place != row:
                self._static.move(row, place)
        self._positions = [self._positions[row] for row in order]
        self._fit(self._positions)
        return order

    @torch.no_grad()
    def hidden(self, tokens: Sequence[int]) -> Float[Tensor, "B 1 D"]:
        """Runs the step of the next size."""
        self._positions = [position + 1 for position in self._positions]
        self._fit(self._positions)
        given, positions = torch.tensor([tokens, self._positions], device=self._device).unsqueeze(-1)
        return self._static.hidden(given, positions)

    def _fit(self, positions: Sequence[int]) -> None:
        """Takes the room in which each row may have one more token."""
        self._static.fit(max(positions, default=0) + 1)


def _last(cache: DecoderCache) -> int:
    assert cache.positions is not None
    return int(cache.positions[0, 0])


class Batch:
    """The running generations, `rows`, with their caches."""

    def __init__(self, model: Decoder, caches: Rows) -> None:
        self.rows: list[RequestHandle] = []
        self._model, self._caches = model, caches
        self._device = model.embedding.weight.device

    @torch.inference_mode()
    def read(self, handle: RequestHandle, tokens: Sequence[int]) -> Float[Tensor, "1 V"] | None:
        """Reads the next tokens of a prompt, alone; returns the logits at the end of the prompt."""
        given = torch.tensor([list(tokens)], device=self._device)
        cache = handle.cache or self._model.new_cache()
        hidden, handle.cache = self._model.hidden(self._model.embed(given), None, cache, tokens=given)
        handle.read_tokens += len(tokens)
        return self._model.logits(hidden[:, -1]) if handle.read_tokens == len(handle.generation.prompt) else None

    def prepare(self, done: Callable[[int, int, int], None]) -> None:
        """Compiles the step, where it is compiled; see `Rows.prepare`."""
        self._caches.prepare(done)

    def clear(self) -> None:
        """Removes all rows."""
        self.rows = []
        self._caches.clear()

    def join(self, handles: Sequence[RequestHandle]) -> None:
        """Adds generations whose prompts have been read."""
        self._caches.join([handle.cache for handle in handles if handle.cache is not None])
        self.rows = [*self.rows, *handles]
        for handle in handles:
            handle.cache = None

    def keep(self, rows: Sequence[int]) -> None:
        """Removes all other rows; the order of those that stay may change."""
        self.rows, before = [], self.rows
        self.rows = [before[row] for row in self._caches.keep(rows)]

    def step(self) -> Float[Tensor, "B V"]:
        """Runs the newest token of every row; returns the next logits."""
        hidden = self._caches.hidden([handle.last for handle in self.rows])
        with torch.inference_mode():
            return self._model.logits(hidden[:, -1])
