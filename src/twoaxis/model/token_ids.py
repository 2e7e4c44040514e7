"""Whether ids belong to a vocabulary."""

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
