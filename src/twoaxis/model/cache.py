"""What generation carries from call to call: one cache per sublayer, and where the next tokens stand.

Letters: B batch, P cached tokens.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from twoaxis.core.errors import ConfigError
from twoaxis.core.layout import PADDING, TokenLayout


@dataclass(frozen=True, eq=False)
class DecoderCache:
    """An immutable value: two continuations may start from the same cache.

    Attributes:
        sublayers: the caches of each sublayer, by block.
        ends: the cache of the two ends of the stack, or None.
        length: tokens seen so far, padding included.
        positions: [B 1] position of the last token of each row, or None before the first call.
        documents: [B P] documents of all tokens so far, or None when every row is one document.
    """

    sublayers: tuple[tuple[Any, ...], ...]
    ends: Any = None
    length: int = 0
    positions: Int[Tensor, "_ 1"] | None = None
    documents: Int[Tensor, "B P"] | None = None

    def layout(self, tokens: int, device: torch.device) -> TokenLayout:
        """The layout of tokens that continue every row where it stopped.

        Raises:
            ConfigError: a row that stopped with padding.
        """
        if self.positions is None:
            return TokenLayout.contiguous(tokens, device=device)
        if self.documents is not None and not torch.compiler.is_compiling():
            ended = self.documents[:, -1:] == PADDING
            if ended.any():
                row = int(ended.nonzero()[0, 0])
                remedy = "pad on the left, or leave padding out"
                raise ConfigError(f"cache: row {row} ends in padding; must end in a real token where it goes on; {remedy}")
        positions = self.positions + torch.arange(1, tokens + 1, device=device)
        documents = None if self.documents is None else self.documents[:, -1:].expand(-1, tokens)
        return TokenLayout(positions, documents, self.documents)

    def place(self, layout: TokenLayout) -> TokenLayout:
        """The given layout of the next tokens, behind what is cached.

        Raises:
            ConfigError: documents here and none in the cache, or the reverse, or tokens behind padding on the right.
        """
        if self.length and (layout.documents is None) != (self.documents is None):
            raise ConfigError(
                "layout: documents must be given in every call of a cached sequence or in none; pass them from the first"
            )
        return layout.after(self.documents)

    def following(self, sublayers: tuple[tuple[Any, ...], ...], ends: Any, layout: TokenLayout) -> "DecoderCache":
        """The cache after the tokens of this layout."""
        documents = layout.documents
        if documents is not None and self.documents is not None:
            documents = torch.cat((self.documents, documents), dim=1)
        length = self.length + layout.positions.shape[1]
        return DecoderCache(sublayers, ends, length, layout.positions[:, -1:], documents)
