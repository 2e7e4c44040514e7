"""One generation, from its request to its last token, and the batch of running generations.

Letters: B rows, T tokens, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from twoaxis.model import Decoder, DecoderCache
from twoaxis.model.cache import join_rows, keep_rows
from twoaxis.model.generate import GREEDY, Sampling

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

    def take(self, logits: Float[Tensor, "1 V"]) -> Ending | None:
        """Chooses the next token and calls the callback; returns the ending after the last token."""
        token = int(self.generation.sampling.choose(logits[:, : self.generation.vocab_size], [self.generator]))
        if token in self.generation.stop_tokens:
            return "stop"
        self.new_tokens, self.last = self.new_tokens + 1, token
        if self.callback.token(token):
            return "stop"
        return "length" if self.new_tokens == self.generation.max_new_tokens else None


class Batch:
    """The running generations, `rows`, with their common cache."""

    def __init__(self, model: Decoder) -> None:
        self.rows: list[RequestHandle] = []
        self._model = model
        self._device = model.embedding.weight.device
        self._cache: DecoderCache | None = None

    @torch.inference_mode()
    def read(self, handle: RequestHandle, tokens: Sequence[int]) -> Float[Tensor, "1 V"] | None:
        """Reads the next tokens of a prompt, alone; returns the logits at the end of the prompt."""
        logits, handle.cache = self._run(torch.tensor([list(tokens)]), handle.cache or self._model.new_cache())
        handle.read_tokens += len(tokens)
        return logits if handle.read_tokens == len(handle.generation.prompt) else None

    @torch.inference_mode()
    def join(self, handles: Sequence[RequestHandle]) -> None:
        """Adds generations whose prompts have been read."""
        caches = [cache for cache in (self._cache, *(handle.cache for handle in handles)) if cache is not None]
        self._cache = join_rows(caches)
        self.rows = [*self.rows, *handles]
        for handle in handles:
            handle.cache = None

    @torch.inference_mode()
    def keep(self, rows: Sequence[int]) -> None:
        """Removes all other rows."""
        self.rows = [self.rows[row] for row in rows]
        assert self._cache is not None
        self._cache = keep_rows(self._cache, torch.tensor(rows, device=self._device)) if rows else None

    @torch.inference_mode()
    def step(self) -> Float[Tensor, "B V"]:
        """Runs the newest token of every row; returns the next logits."""
        assert self._cache is not None
        logits, self._cache = self._run(torch.tensor([[handle.last] for handle in self.rows]), self._cache)
        return logits

    def _run(self, tokens: Int[Tensor, "B T"], cache: DecoderCache) -> tuple[Float[Tensor, "B V"], DecoderCache]:
        hidden, next_cache = self._model.hidden(
            self._model.embed(tokens.to(self._device)), None, cache, tokens=tokens.to(self._device)
        )
        assert next_cache is not None
        return self._model.logits(hidden[:, -1]), next_cache
