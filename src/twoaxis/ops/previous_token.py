"""The token before each token, across calls and within documents.

Letters: B batch, T position, C channels, P tokens of history, R = P + T.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor


def previous_token(
    x: Float[Tensor, "B T C"], history: Float[Tensor, "B P C"] | None = None, documents: Int[Tensor, "B R"] | None = None
) -> Float[Tensor, "B T C"]:
    """Returns for each token the one before it in its own document, and zeros before the first.

    Args:
        x: the new tokens.
        history: the tokens before these, of which the last is used.
        documents: of the history and the new tokens; None when every row is one document.

    Example:
        >>> previous_token(torch.tensor([[[1.0], [2.0], [3.0]]])).flatten()
        tensor([0., 1., 2.])
    """
    if history is None or not history.shape[1]:
        before = F.pad(x[:, :-1], (0, 0, 1, 0))
    else:
        before = torch.cat((history[:, -1:], x[:, :-1]), dim=1)
    if documents is None:
        return before
    # The first token of all has none before it; its own document there leaves the zeros as they are.
    known = torch.cat((documents[:, :1], documents), dim=1)[:, -x.shape[1] - 1 :]
    return before * (known[:, 1:] == known[:, :-1]).unsqueeze(-1)
