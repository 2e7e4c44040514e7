"""Classes of tokens by position, frequency and text, for any tokenizer.

Letters: B batch, T position, K classes, V vocabulary.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from twoaxis.core.errors import DataError
from twoaxis.core.layout import TokenLayout
from twoaxis.data import Tokenizer

FREQUENT, RARE = 0.5, 0.1
"""Shares of all tokens covered by the most frequent ids, and by the rarest."""

TEXT = ("space", "letters", "digits", "punctuation", "other")


class TokenClasses(NamedTuple):
    """The ids of each class.

    `first` is the first token of a document or window. `frequent` ids cover half of the sample, `rare` ids the rarest tenth.
    The other classes depend on the text of the id.

    Attributes:
        by_id: members of every class that depends on the id alone.
    """

    by_id: dict[str, Bool[Tensor, " V"]]

    @property
    def names(self) -> tuple[str, ...]:
        """All classes with a token in the sample."""
        return ("all", "first", *self.by_id)

    def masks(self, tokens: Int[Tensor, "B T"], layout: TokenLayout) -> Bool[Tensor, "K B T"]:
        """The members of each class in a batch."""
        first = (layout.positions == 0).expand_as(tokens)
        return torch.stack([torch.ones_like(first), first, *(ids[tokens] for ids in self.by_id.values())])


def token_classes(batches: Iterable[Int[Tensor, "B T"]], tokenizer: Tokenizer, vocab_size: int) -> TokenClasses:
    """Classifies the ids of a sample."""
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for tokens in batches:
        counts += torch.bincount(tokens.flatten(), minlength=vocab_size)
    order = torch.argsort(counts, descending=True, stable=True)
    below = counts[order].cumsum(0)
    total = int(below[-1])
    by_id = {name: torch.zeros(vocab_size, dtype=torch.bool) for name in ("frequent", "rare", *TEXT)}
    by_id["frequent"][order] = below - counts[order] < FREQUENT * total
    by_id["rare"][order] = below - counts[order] >= (1 - RARE) * total
    for token in torch.nonzero(counts).flatten().tolist():
        by_id[_text_class(tokenizer, token)][token] = True
    seen = counts > 0
    return TokenClasses({name: ids & seen for name, ids in by_id.items() if bool((ids & seen).any())})


def _text_class(tokenizer: Tokenizer, token: int) -> str:
    try:
        text = tokenizer.decode([token])
    except DataError:
        # A model may have more ids than its tokenizer.
        return "other"
    bare = text.strip()
    if text and not bare:
        return "space"
    if bare.isalpha():
        return "letters"
    if bare.isdigit():
        return "digits"
    if bare.isascii() and bare.isprintable() and bare and not any(character.isalnum() for character in bare):
        return "punctuation"
    return "other"
