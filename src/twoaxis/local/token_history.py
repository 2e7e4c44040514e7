"""The last tokens of each row: what mixers that look a few tokens back carry from call to call.

Letters: B batch, T position, C channels, P tokens of history.
"""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from twoaxis.ops.causal_conv import next_history


@dataclass(frozen=True, eq=False)
class TokenHistory:
    """The last tokens of each row: an immutable value in storage of its own."""

    tokens: Float[Tensor, "B P C"] | None = None

    @property
    def length(self) -> int:
        """How many tokens are kept."""
        return 0 if self.tokens is None else self.tokens.shape[1]

    def following(self, x: Float[Tensor, "B T C"], kernel: int) -> "TokenHistory":
        """The history after these tokens, for a mixer that sees `kernel` tokens: the last `kernel - 1`, or all there are."""
        return TokenHistory(next_history(self.tokens, x, kernel))
