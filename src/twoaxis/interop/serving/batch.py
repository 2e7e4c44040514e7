"""The generations that run together, and what they have cached.

Letters: B rows, T tokens, V vocabulary.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from twoaxis.interop.serving.generation import Ticket
from twoaxis.model import Decoder, DecoderCache
from twoaxis.model.cache_rows import join_rows, keep_rows


class Batch:
    """Rows of one cache, in the order in which they joined.

    Attributes:
        rows: the generations.
    """

    def __init__(self, model: Decoder) -> None:
        self.rows: list[Ticket] = []
        self._model = model
        self._device = model.embedding.weight.device
        self._cache: DecoderCache | None = None

    @torch.inference_mode()
    def read(self, ticket: Ticket, tokens: Sequence[int]) -> Float[Tensor, "1 V"] | None:
        """Reads the next tokens of a prompt, alone; returns what they predict when the prompt is over."""
        logits, ticket.cache = self._run(torch.tensor([list(tokens)]), ticket.cache or self._model.new_cache())
        ticket.read_tokens += len(tokens)
        return logits if ticket.read_tokens == len(ticket.generation.prompt) else None

    @torch.inference_mode()
    def join(self, tickets: Sequence[Ticket]) -> None:
        """Takes in generations whose prompts have been read."""
        caches = [cache for cache in (self._cache, *(ticket.cache for ticket in tickets)) if cache is not None]
        self._cache = join_rows(caches)
        self.rows = [*self.rows, *tickets]
        for ticket in tickets:
            ticket.cache = None

    @torch.inference_mode()
    def keep(self, places: Sequence[int]) -> None:
        """Lets the rows at all other places go."""
        self.rows = [self.rows[place] for place in places]
        assert self._cache is not None
        self._cache = keep_rows(self._cache, torch.tensor(places, device=self._device)) if places else None

    @torch.inference_mode()
    def step(self) -> Float[Tensor, "B V"]:
        """Runs the newest token of every row; returns what it predicts."""
        assert self._cache is not None
        logits, self._cache = self._run(torch.tensor([[ticket.last] for ticket in self.rows]), self._cache)
        return logits

    def _run(self, tokens: Int[Tensor, "B T"], cache: DecoderCache) -> tuple[Float[Tensor, "B V"], DecoderCache]:
        hidden, following = self._model.hidden(self._model.embed(tokens.to(self._device)), None, cache)
        assert following is not None
        return self._model.logits(hidden[:, -1]), following
