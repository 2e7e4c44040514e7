"""A batch of packed windows. Letters: B windows, T tokens in each."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from twoaxis.core.errors import DataError
from twoaxis.data.shards import TokenShard
from twoaxis.ops.cross_entropy import IGNORE

Packing = Literal["isolated", "joined"]
"""`isolated`: no attention between the documents of a window, and no target crosses a boundary.
`joined`: a window is one text."""


class Batch(NamedTuple):
    """Windows of tokens, and the next token at every position: `IGNORE` if it belongs to another document or is no answer.

    Documents are counted from 0 within a row; None if every row is one text.
    """

    tokens: Int[Tensor, "B T"]
    targets: Int[Tensor, "B T"]
    documents: Int[Tensor, "B T"] | None

    @property
    def n_targets(self) -> int:
        """The number of targets in the loss."""
        return int((self.targets != IGNORE).sum())

    def to(self, device: torch.device | str) -> "Batch":
        """Returns the batch on a device."""
        documents = None if self.documents is None else self.documents.to(device)
        return Batch(self.tokens.to(device), self.targets.to(device), documents)

    def part(self, index: int, count: int, size: int | None = None) -> "Batch":
        """One of `count` parts of equal size; missing rows are copies of another, with all targets `IGNORE`.

        Args:
            index: of the part.
            count: of all parts.
            size: of each part; None is as small as it can be.
        """
        size = -(-len(self.tokens) // count) if size is None else size
        rows = torch.arange(index * size, (index + 1) * size)
        there = rows < len(self.tokens)
        rows = rows.clamp(max=len(self.tokens) - 1)
        documents = None if self.documents is None else self.documents[rows]
        return Batch(self.tokens[rows], self.targets[rows].masked_fill(~there[:, None], IGNORE), documents)

    def micro_batches(self, rows: int) -> "list[Batch]":
        """Cuts the batch into batches of at most this many rows."""
        tokens, targets = self.tokens.split(rows), self.targets.split(rows)
        documents = [None] * len(tokens) if self.documents is None else self.documents.split(rows)
        return [Batch(*parts) for parts in zip(tokens, targets, documents, strict=True)]


def windows_in(shard: TokenShard, seq_len: int) -> int:
    """Counts the whole windows of `seq_len` tokens with a next token at every position.

    Raises:
        DataError: there is none.
    """
    if seq_len < 1:
        raise DataError(f"seq_len={seq_len}: must be at least 1; set it to the length of the windows")
    count = (len(shard) - 1) // seq_len
    if not count:
        shorter = f", or set seq_len to at most {len(shard) - 1}" if len(shard) > 1 else ""
        raise DataError(
            f"{shard.path.name} has {len(shard)} tokens; must have at least seq_len + 1 = {seq_len + 1}; use more text{shorter}"
        )
    return count


def read_batch(
    shard: TokenShard, windows: np.ndarray, seq_len: int, packing: Packing, answer_cues: Sequence[int] = ()
) -> Batch:
    """Reads windows; window i holds the tokens i*T to i*T + T - 1, and its last target is token i*T + T.

    With answer cues, only targets after one of these tokens count.
    """
    first = windows.astype(np.int64) * seq_len
    rows = np.stack([shard.window(start, start + seq_len + 1) for start in first.tolist()])
    tokens, targets = rows[:, :-1].copy(), rows[:, 1:].copy()
    if answer_cues:
        targets[~np.isin(tokens, answer_cues)] = IGNORE
    documents = None
    if packing == "isolated":
        numbers = shard.document_numbers(first[:, None] + np.arange(seq_len + 1))
        targets[numbers[:, 1:] != numbers[:, :-1]] = IGNORE
        documents = torch.from_numpy(numbers[:, :-1] - numbers[:, :1])
    return Batch(torch.from_numpy(tokens), torch.from_numpy(targets), documents)
