"""How the next token is chosen from logits.

Letters: B batch, V vocabulary.
"""

import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor

from twoaxis.core.config import Config


class Sampling(Config):
    """Greedy decoding at temperature 0, else sampling from the tempered, truncated distribution.

    Args:
        temperature: divides the logits; 0 takes the most likely token.
        top_k: keep this many of the most likely tokens; None keeps all.
        top_p: keep the smallest set of most likely tokens whose probability reaches this; 1 keeps all.
        seed: seed of the random draws.

    Example:
        >>> Sampling(temperature=0.8, top_k=50).top_p
        1.0
    """

    temperature: float = Field(default=0.0, ge=0)
    top_k: int | None = Field(default=None, ge=1)
    top_p: float = Field(default=1.0, gt=0, le=1)
    seed: int = 0

    def generator(self) -> torch.Generator:
        """A fresh source of randomness for one generation."""
        return torch.Generator().manual_seed(self.seed)

    def choose(self, logits: Float[Tensor, "B V"], generator: torch.Generator) -> Int[Tensor, " B"]:
        """Chooses one token per row."""
        if self.temperature == 0:
            return logits.argmax(-1)
        probabilities = torch.softmax(self.truncate(logits.float() / self.temperature), dim=-1)
        # Drawn on the CPU, so that a seed means the same tokens on every device.
        return torch.multinomial(probabilities.cpu(), 1, generator=generator).squeeze(-1).to(logits.device)

    def truncate(self, logits: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        """Sets the logits outside top-k and top-p to minus infinity; the most likely token always stays."""
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            smallest = logits.topk(self.top_k, dim=-1).values[..., -1:]
            logits = logits.masked_fill(logits < smallest, -torch.inf)
        if self.top_p < 1:
            ordered, order = logits.sort(dim=-1, descending=True)
            probabilities = ordered.softmax(-1)
            before = probabilities.cumsum(-1) - probabilities
            dropped = torch.empty_like(before, dtype=torch.bool).scatter_(-1, order, before >= self.top_p)
            logits = logits.masked_fill(dropped, -torch.inf)
        return logits
