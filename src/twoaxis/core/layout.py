"""The positions of the tokens of a batch, and the documents that isolate them.

Letters: B batch, T tokens of this call, P tokens before them in the cache, S keys seen from this call, H heads, G kv-heads,
K key width.
"""

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from twoaxis.core.errors import ConfigError

Attend = Callable[[nn.Module, Float[Tensor, "B H T K"], Float[Tensor, "B G T K"], Float[Tensor, "B G T K"]], Tensor]
"""Attention of a module over the keys and values of these tokens and of earlier ones that it has cached: [B T H*K]."""

PADDING = -1
"""The document id of padding; documents are numbered from 0."""

X = TypeVar("X")


@dataclasses.dataclass(frozen=True, eq=False)
class TokenLayout:
    """Positions and documents of the tokens of one call; padding is the document `PADDING`.

    One rule covers packed batches, left padding and ragged generation: a token attends only to earlier tokens of its document.
    Positions are absolute within the document. Rows may be padded on the right too, but then no tokens may follow, since
    windows and convolutions count padding.

    Attributes:
        positions: [B T] or [1 T], int64, counted from 0 at the first token of the document.
        documents: [B T], or None if every row is one document.
        past_documents: [B P] documents of all cached tokens, or None as above.
        attend: replaces the attention of this library, including cache, masks, window and sink; None unless another library
            runs the model.
        tokens: ids of the tokens, for mixers that look them up in a table; None where only vectors are known.
    """

    positions: Int[Tensor, "_ T"]
    documents: Int[Tensor, "B T"] | None = None
    past_documents: Int[Tensor, "B P"] | None = None
    attend: Attend | None = None
    tokens: Int[Tensor, "B T"] | None = None
    _shared: dict[Hashable, Any] = dataclasses.field(default_factory=dict, repr=False)

    @staticmethod
    def contiguous(tokens: int, start: int = 0, device: torch.device | None = None) -> "TokenLayout":
        """The layout of rows that are one document each, beginning at absolute position `start`."""
        return TokenLayout(torch.arange(start, start + tokens, device=device).unsqueeze(0))

    @staticmethod
    def packed(documents: Int[Tensor, "B T"]) -> "TokenLayout":
        """The layout of rows packed with several documents; positions restart with each document."""
        index = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
        begins = torch.ones_like(documents, dtype=torch.bool)
        begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
        first = torch.where(begins, index, 0).cummax(dim=1).values
        return TokenLayout(index - first, documents)

    @staticmethod
    def left_padded(lengths: Int[Tensor, " B"], tokens: int) -> "TokenLayout":
        """The layout of rows whose last `lengths[b]` tokens are real and whose other tokens are padding."""
        index = torch.arange(tokens, device=lengths.device) - (tokens - lengths[:, None])
        documents = torch.where(index >= 0, 0, PADDING)
        return TokenLayout(index.clamp(min=0), documents)

    def part(self, start: int, stop: int) -> "TokenLayout":
        """The layout of the tokens `start..stop` of this call, as for a separate call."""
        documents = None if self.documents is None else self.documents[:, start:stop]
        tokens = None if self.tokens is None else self.tokens[:, start:stop]
        return TokenLayout(self.positions[:, start:stop], documents, self.past_documents, self.attend, tokens)

    def after(self, past_documents: Int[Tensor, "B P"] | None) -> "TokenLayout":
        """The same tokens after these cached documents, without shared values.

        Raises:
            ConfigError: padding between tokens of a row. On a GPU, checked only with cached documents, since it synchronises.
        """
        documents = self.documents
        if documents is not None and not torch.compiler.is_compiling():
            if past_documents is not None:
                check_padding("layout", torch.cat((past_documents, documents), dim=1) != PADDING)
            elif documents.device.type == "cpu":
                check_padding("layout", documents != PADDING)
        return TokenLayout(self.positions, self.documents, past_documents, self.attend, self.tokens)

    def of(self, tokens: Int[Tensor, "B T"] | None) -> "TokenLayout":
        """The same layout with the ids of its tokens; None leaves it as it is."""
        return self if tokens is None else dataclasses.replace(self, tokens=tokens, _shared={})

    def ids(self, kind: str) -> Int[Tensor, "B T"]:
        """The ids of the tokens, for a mixer of this kind.

        Raises:
            ConfigError: only vectors are known.
        """
        if self.tokens is None:
            raise ConfigError(f"{kind}: the layout has no token ids: must have them; pass input ids, or layout.of(tokens)")
        return self.tokens

    def key_documents(self, keys: int) -> Int[Tensor, "B S"] | None:
        """The documents of the last `keys` tokens, including cached ones."""
        if self.documents is None:
            return None
        if self.past_documents is None:
            return self.documents[:, -keys:]
        return torch.cat((self.past_documents, self.documents), dim=1)[:, -keys:]

    def key_positions(self, keys: int) -> Int[Tensor, "_ S"]:
        """The positions of the last `keys` tokens; cached ones count back from the first token of this call.

        So they are right within its document, and anything elsewhere.
        """
        past = keys - self.positions.shape[1]
        if not past:
            return self.positions
        before = self.positions[:, :1] - torch.arange(past, 0, -1, device=self.positions.device)
        return torch.cat((before, self.positions), dim=1)

    def chunk_documents(self, size: int, keys: int) -> tuple[Int[Tensor, "_ T"], Int[Tensor, "_ S"]]:
        """Documents cut into chunks that begin at multiples of a size, of these tokens and of the last `keys` ones.

        Positions are absolute, so that a chunk is the same in any calls, and begins anew with each document.
        """
        chunks, documents = self.key_positions(keys) // size, self.key_documents(keys)
        if documents is not None:
            # Neither number reaches half of the factor.
            chunks = documents * 2**32 + chunks
        return chunks[:, -self.positions.shape[1] :], chunks

    def without_padding(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """Replaces padding with zeros, since a NaN spreads even with weight zero.

        Cost: nothing without documents, else one pass over x.
        """
        return x if self.documents is None else x.masked_fill((self.documents == PADDING).unsqueeze(-1), 0.0)

    def shared(self, key: Hashable, make: Callable[[], X]) -> X:
        """Returns a value that depends on this layout alone, such as rotation tables; computed once per call."""
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]


def check_padding(what: str, real: Bool[Tensor, "B S"]) -> None:
    """Refuses padding between tokens of a row, which windows and convolutions would count.

    Raises:
        ConfigError: the first such row of `what`.
    """
    broken = (real & ~F.pad(real[:, :-1], (1, 0))).sum(dim=1) > 1
    if broken.any():
        row = int(broken.nonzero()[0])
        raise ConfigError(
            f"{what}: row {row} has padding between real tokens; must be padded on one side, on the left where a cache goes "
            "on; pad on the left, or leave padding out"
        )
