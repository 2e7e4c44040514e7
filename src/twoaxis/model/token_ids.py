"""Whether ids are ids, and belong to a vocabulary."""

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from twoaxis.core.errors import DataError, problem


def check_token_ids(tokens: Int[Tensor, "*n"], vocab_size: int) -> None:
    """Checks ids of any shape.

    Raises:
        DataError: a token id outside the vocabulary.
    """
    if not tokens.numel():
        return
    low, high = tokens.aminmax()
    if low < 0 or high >= vocab_size:
        bad = int(low) if low < 0 else int(high)
        raise DataError(problem("token id", bad, f"in 0..{vocab_size - 1}", "use the model's own tokenizer"))


def check_id_tensor(what: str, ids: Any) -> None:
    """Checks what a caller passes for ids, whatever it is; their range is looked at elsewhere.

    Raises:
        DataError: anything but a tensor of integers [batch, tokens].
    """
    if isinstance(ids, Tensor) and ids.ndim == 2 and ids.dtype in (torch.int64, torch.int32):
        return
    got = f"{str(ids.dtype).removeprefix('torch.')} {[*ids.shape]}" if isinstance(ids, Tensor) else type(ids).__name__
    raise DataError(f"{what}: got {got}; must be a tensor of int64 [batch, tokens]; pass torch.tensor([[1, 2, 3]])")
