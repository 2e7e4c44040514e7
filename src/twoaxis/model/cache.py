"""The cache of a decoder: one per sublayer, the next positions, and batches of rows that join and leave.

One rule serves every mixer: the first axis of a tensor is the batch (an axis of 1 serves all rows), and where a tensor has a
second axis of tokens, the last token is last. `KeyValueCache` has its own methods for rows and tokens.

Letters: B batch, N rows, P cached tokens.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor

from twoaxis.core.errors import ConfigError, problem
from twoaxis.core.key_value_cache import KeyValueCache, KeyValueRing
from twoaxis.core.layout import PADDING, TokenLayout

AnyKeyValueCache = KeyValueCache | KeyValueRing


@dataclass(frozen=True, eq=False)
class DecoderCache:
    """An immutable value: two continuations may start from the same cache.

    Attributes:
        sublayers: the caches of each sublayer, by block.
        ends: the cache of the two ends of the stack, or None.
        length: tokens seen so far, padding included.
        positions: [B 1] position of the last token of each row, or None before the first call.
        documents: [B P] documents of all tokens so far, or None when every row is one document.
        embedding: the cache of the local mixer behind the embedding, or None.
    """

    sublayers: tuple[tuple[Any, ...], ...]
    ends: Any = None
    length: int = 0
    positions: Int[Tensor, "_ 1"] | None = None
    documents: Int[Tensor, "B P"] | None = None
    embedding: Any = None

    def layout(self, tokens: int, device: torch.device) -> TokenLayout:
        """Returns the layout of tokens that continue every row.

        Raises:
            ConfigError: a row that ends in padding.
        """
        if self.positions is None:
            return TokenLayout.contiguous(tokens, device=device)
        if self.documents is not None and not torch.compiler.is_compiling():
            ended = self.documents[:, -1:] == PADDING
            if ended.any():
                row = int(ended.nonzero()[0, 0])
                remedy = "pad on the left, or leave padding out"
                raise ConfigError(f"cache: row {row} ends in padding; must end in a real token to be continued; {remedy}")
        positions = self.positions + torch.arange(1, tokens + 1, device=device)
        documents = None if self.documents is None else self.documents[:, -1:].expand(-1, tokens)
        return TokenLayout(positions, documents, self.documents)

    def place(self, layout: TokenLayout) -> TokenLayout:
        """Returns the layout of the next tokens with the documents of the cached tokens before them.

        Raises:
            ConfigError: documents here and none in the cache, or the reverse, or tokens behind padding on the right.
        """
        if self.length and (layout.documents is None) != (self.documents is None):
            raise ConfigError(
                "layout: documents must be given in every call of a cached sequence or in none; pass them from the first"
            )
        return layout.after(self.documents)

    def next_cache(
        self, sublayers: tuple[tuple[Any, ...], ...], ends: Any, layout: TokenLayout, embedding: Any = None
    ) -> "DecoderCache":
        """Returns the cache after the tokens of this layout."""
        documents = layout.documents
        if documents is not None and self.documents is not None:
            documents = torch.cat((self.documents, documents), dim=1)
        length = self.length + layout.positions.shape[1]
        return DecoderCache(sublayers, ends, length, layout.positions[:, -1:], documents, embedding)


def select_rows(value: Any, rows: Int[Tensor, " N"], batch: int) -> Any:
    """Selects rows of every tensor of a nested cache.

    Args:
        value: a cache of a mixer, or of a decoder.
        rows: their indices, in any order.
        batch: number of rows before the selection.

    Raises:
        ConfigError: a value that is neither a tensor nor made of tensors.
    """

    def select(tensors: Sequence[Any]) -> Any:
        (tensor,) = tensors
        if isinstance(tensor, KeyValueCache):
            return tensor.rows(rows)
        return tensor if tensor.shape[0] == 1 != batch else tensor[rows.to(tensor.device)]

    return walk(select, [value])


def keep_rows(cache: DecoderCache, rows: Int[Tensor, " N"]) -> DecoderCache:
    """Selects rows of a cache that `join_rows` made, and drops columns that are padding in all of them.

    Cost: a copy of the cache of these rows.
    """
    assert cache.positions is not None
    return _without_padding(select_rows(cache, rows, cache.positions.shape[0]))


def join_rows(caches: Sequence[DecoderCache]) -> DecoderCache:
    """Joins the rows of all caches to one batch; shorter ones are padded on the left, and no row attends to padding.

    Every row continues as it would alone. Each cache holds tokens and has one entry of `positions` per
    row: a cache of one prompt, or a result of this function or of `keep_rows`.

    Cost: a copy of all caches; a decoding step costs every row as much as the longest one.

    Raises:
        ConfigError: caches of different models.
    """
    counts = [0 if cache.positions is None else cache.positions.shape[0] for cache in caches]
    if not counts or min(counts) == 0:
        raise ConfigError(problem("caches", counts, "at least one, each with tokens", "run the prompts first"))
    tokens = max(columns(cache) for cache in caches)
    documents = [_documents(cache, tokens, count) for cache, count in zip(caches, counts, strict=True)]
    mixers = walk(lambda parts: _join(parts, counts), [carried(cache) for cache in caches])
    positions = torch.cat([cache.positions for cache in caches if cache.positions is not None])
    length = int(positions.max()) + 1
    return _without_padding(DecoderCache(length=length, positions=positions, documents=torch.cat(documents), **mixers))


def _without_padding(cache: DecoderCache) -> DecoderCache:
    """Drops the columns that are padding in every row."""
    assert cache.positions is not None
    length = int(cache.positions.max()) + 1

    def cut(tensors: Sequence[Any]) -> Any:
        (tensor,) = tensors
        return tensor.last(length) if isinstance(tensor, KeyValueCache) else tensor

    mixers = walk(cut, [carried(cache)])
    documents = cache.documents
    if documents is not None:
        # A convolution may hold more tokens than that, and needs the documents of all of them.
        held = max((part.shape[1] for part in parts(mixers) if isinstance(part, Tensor) and part.ndim > 1), default=0)
        documents = documents[:, -max(length, held) :]
        if not (documents == PADDING).any():
            documents = None
    return DecoderCache(length=length, positions=cache.positions, documents=documents, **mixers)


def carried(cache: DecoderCache) -> dict[str, Any]:
    """The caches of all mixers."""
    return {"sublayers": cache.sublayers, "ends": cache.ends, "embedding": cache.embedding}


def columns(cache: DecoderCache) -> int:
    """Tokens that the longest row holds, with the padding before it."""
    return cache.length if cache.documents is None else cache.documents.shape[1]


def _documents(cache: DecoderCache, tokens: int, rows: int) -> Int[Tensor, "N P"]:
    assert cache.positions is not None
    documents = cache.documents
    if documents is None:
        documents = torch.zeros(rows, cache.length, dtype=torch.long, device=cache.positions.device)
    return F.pad(documents, (tokens - documents.shape[1], 0), value=PADDING)


def _join(parts: Sequence[Any], counts: Sequence[int]) -> Any:
    if isinstance(parts[0], KeyValueCache):
        return KeyValueCache.join(parts)
    whole = [
        part.expand(count, *part.shape[1:]) if part.shape[0] == 1 else part for part, count in zip(parts, counts, strict=True)
    ]
    if len({part.shape[1:] for part in whole}) > 1:
        # Mixers start from zeros before the first token.
        tokens = max(part.shape[1] for part in whole)
        whole = [F.pad(part, (0, 0) * (part.ndim - 2) + (tokens - part.shape[1], 0)) for part in whole]
    if len({part.shape[1:] for part in whole}) > 1:
        shapes = sorted({tuple(part.shape) for part in parts})
        raise ConfigError(problem("cache", shapes, "alike but for rows and tokens", "join caches of one model"))
    return torch.cat(whole)


def parts(value: Any) -> list[Tensor | AnyKeyValueCache]:
    """All tensors and key-value caches of a nested cache, in order."""
    found: list[Tensor | AnyKeyValueCache] = []

    def note(at: Sequence[Any]) -> Any:
        found.extend(at)
        return at[0]

    walk(note, [value])
    return found


def walk(change: Callable[[Sequence[Any]], Any], values: Sequence[Any]) -> Any:
    """Maps `change` over the tensors and key-value caches at the same position of all values; results are nested alike."""
    first = values[0]
    if first is None or isinstance(first, int | float | str):
        return first
    if isinstance(first, Tensor | AnyKeyValueCache):
        return change(values)
    if isinstance(first, Mapping):
        return {key: walk(change, [value[key] for value in values]) for key in first}
    if isinstance(first, tuple | list):
        items = [walk(change, parts) for parts in zip(*values, strict=True)]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in dataclasses.fields(first)]
        fields = {name: walk(change, [getattr(value, name) for value in values]) for name in names}
        return dataclasses.replace(first, **fields)
    allowed = "made of tensors, tuples, mappings and dataclasses"
    raise ConfigError(problem("cache", type(first).__name__, allowed, "write the mixer's cache with these"))
