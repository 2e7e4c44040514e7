"""How the next token is chosen from logits.

Letters: B batch, V vocabulary.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor

from twoaxis.core.config import Config
from twoaxis.core.errors import DataError

SMALLEST_TEMPERATURE = 1e-6
"""Below it the most likely token is taken: logits are rounded by more than such a division tells apart, and it may overflow."""

SEEDS = 2**64
"""A generator takes seeds from 0 up to here, and negative ones that count from the end."""


class Sampling(Config):
    """Greedy decoding at temperature 0, else sampling from the tempered, truncated distribution.

    Args:
        temperature: divides the logits; 0, as anything below 1e-6, takes the most likely token.
        top_k: keep this many of the most likely tokens; None keeps all.
        top_p: keep the smallest set of most likely tokens whose probability reaches this; 1 keeps all.
        seed: of the random draws, from -2**63 to 2**64 - 1; row i of a batch draws with `seed + i`.

    Example:
        >>> Sampling(temperature=0.8, top_k=50).top_p
        1.0
    """

    temperature: float = Field(default=0.0, ge=0)
    top_k: int | None = Field(default=None, ge=1)
    top_p: float = Field(default=1.0, gt=0, le=1)
    seed: int = Field(default=0, ge=-(SEEDS // 2), lt=SEEDS)

    def generator(self, row: int = 0) -> torch.Generator:
        """A fresh source of randomness for one generation: row `row` draws as one alone with `seed + row` would."""
        return torch.Generator().manual_seed((self.seed + row) % SEEDS)

    def choose(self, logits: Float[Tensor, "B V"], generators: Sequence[torch.Generator]) -> Int[Tensor, " B"]:
        """Chooses one token per row.

        Args:
            logits: of all tokens that may be chosen.
            generators: one per row, so that no row's draws depend on its batch mates.

        Raises:
            DataError: logits that are no numbers.
        """
        if self.temperature < SMALLEST_TEMPERATURE:
            return _numbers(logits).argmax(-1)
        probabilities = torch.softmax(self.truncate(_numbers(logits.float() / self.temperature)), dim=-1)
        # Drawn on the CPU, so that a seed means the same tokens on every device.
        rows = probabilities.cpu().split(1)
        drawn = [torch.multinomial(row, 1, generator=one) for row, one in zip(rows, generators, strict=True)]
        return torch.cat(drawn).squeeze(-1).to(logits.device)

    def truncate(self, logits: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        """Sets the logits outside top-k and top-p to minus infinity; the most likely token always stays."""
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            smallest = logits.topk(self.top_k, dim=-1).values[..., -1:]
            logits = logits.masked_fill(logits < smallest, -torch.inf)
        if self.top_p < 1:
            ordered, order = logits.sort(dim=-1, descending=True)
            probabilities = ordered.softmax(-1)
            beyond = probabilities.cumsum(-1) - probabilities >= self.top_p
            # A top_p that rounds to 0 would drop it too.
            beyond[..., 0] = False
            logits = logits.masked_fill(torch.empty_like(beyond).scatter_(-1, order, beyond), -torch.inf)
        return logits


def _numbers(logits: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
    # The largest is not finite where any is NaN or infinite, or where none can be chosen.
    if not logits.amax(-1).isfinite().all():
        raise DataError("logits: got infinite ones or NaN: must be numbers; generate with a model that has not diverged")
    return logits
