"""What is asked of the engine, and who hears of the result.

Letters: V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from twoaxis.model import DecoderCache
from twoaxis.model.generate import GREEDY
from twoaxis.model.sampling import Sampling

Ending = Literal["stop", "length", "cancelled", "error"]


class Listener(Protocol):
    """Hears of the new tokens of one generation in the thread of the model, so it must be quick and must not wait."""

    def token(self, token: int) -> bool:
        """Takes the next token, and says whether the generation ends with it."""
        ...

    def end(self, ending: Ending) -> None:
        """Takes the ending; nothing follows it."""
        ...


@dataclass(frozen=True)
class Generation:
    """What is asked.

    Attributes:
        prompt: at least one token.
        max_new_tokens: at least 1.
        sampling: how tokens are chosen, with a seed of its own.
        stop_tokens: it ends before any of these.
        vocab_size: only ids below it are chosen; None allows all.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    sampling: Sampling = GREEDY
    stop_tokens: frozenset[int] = frozenset()
    vocab_size: int | None = None


@dataclass(eq=False)
class Ticket:
    """A generation on its way.

    Attributes:
        generation: what was asked.
        listener: who hears of it.
        generator: the draws of this generation alone.
        cancelled: set from any thread.
        seated: whether it takes one of the places of those that run.
        cache: while the prompt is being read.
        read_tokens: of the prompt, so far.
        new_tokens: so far.
        last: the newest token.
    """

    generation: Generation
    listener: Listener
    generator: torch.Generator = field(init=False)
    cancelled: bool = False
    seated: bool = False
    cache: DecoderCache | None = None
    read_tokens: int = 0
    new_tokens: int = 0
    last: int = -1

    def __post_init__(self) -> None:
        self.generator = self.generation.sampling.generator()

    def cancel(self) -> None:
        """Takes the generation out before the next step; its listener hears the ending `cancelled`."""
        self.cancelled = True

    def take(self, logits: Float[Tensor, "1 V"]) -> Ending | None:
        """Chooses the next token and tells the listener; returns how the generation ends, if it does."""
        token = int(self.generation.sampling.choose(logits[:, : self.generation.vocab_size], [self.generator]))
        if token in self.generation.stop_tokens:
            return "stop"
        self.new_tokens, self.last = self.new_tokens + 1, token
        if self.listener.token(token):
            return "stop"
        return "length" if self.new_tokens == self.generation.max_new_tokens else None
