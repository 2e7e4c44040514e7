"""Batches of packed windows, and their order: in training by seed and step alone, in validation that of the text.

Letters: B windows, T tokens in each.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from twoaxis.core.errors import CheckpointError, ConfigError, DataError
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


class PackedSampler:
    """Yields batches of windows without end: every epoch has every window once, in a new order.

    A batch depends on the arguments and the step alone, so arms with equal arguments have equal data, and a resumed run
    continues exactly. A batch may span two epochs. The last tokens of the shard, fewer than a window, are not used.

    Args:
        shard: the tokens.
        batch_size: windows in a batch.
        seq_len: tokens in a window.
        seed: of the order, at least 0.
        packing: whether documents in a window are isolated.
        answer_cues: the tokens after which a target counts; if empty, all count.

    Raises:
        DataError: the shard is shorter than one window and the token after it.
        ConfigError: an impossible batch size, seed or packing.
    """

    def __init__(
        self,
        shard: TokenShard,
        batch_size: int,
        seq_len: int,
        seed: int = 0,
        packing: Packing = "isolated",
        answer_cues: Sequence[int] = (),
    ) -> None:
        if batch_size < 1 or seed < 0:
            raise ConfigError(f"batch_size={batch_size}, seed={seed}: must be at least 1 and at least 0; correct them")
        if packing not in ("isolated", "joined"):
            raise ConfigError(f"packing={packing!r}: must be 'isolated' or 'joined'; choose one")
        self.shard, self.batch_size, self.seq_len, self.seed = shard, batch_size, seq_len, seed
        self.packing: Packing = packing
        self.answer_cues = tuple(answer_cues)
        self.windows_per_epoch = windows_in(shard, seq_len)
        self.step = 0
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    def next(self) -> Batch:
        """Returns the batch of the current step and advances the step."""
        batch = self.batch(self.step)
        self.step += 1
        return batch

    def batch(self, step: int) -> Batch:
        """Reads the batch of any step."""
        drawn = range(step * self.batch_size, (step + 1) * self.batch_size)
        windows = [self._epoch_order(number // self.windows_per_epoch)[number % self.windows_per_epoch] for number in drawn]
        return read_batch(self.shard, np.asarray(windows), self.seq_len, self.packing, self.answer_cues)

    def windows(self, steps: int) -> np.ndarray:
        """The indices of the windows in the first `steps` batches, each once, in text order."""
        drawn = steps * self.batch_size
        if drawn >= self.windows_per_epoch:
            return np.arange(self.windows_per_epoch)
        return np.sort(self._epoch_order(0)[:drawn])

    def state(self) -> dict[str, Any]:
        """The step and the arguments that it is valid for, as JSON-ready data."""
        return {
            "step": self.step,
            "corpus": self.shard.header.corpus,
            "tokenizer": self.shard.header.tokenizer,
            "shard": self.shard.fingerprint,
            "batch_size": self.batch_size,
            "seq_len": self.seq_len,
            "seed": self.seed,
            "packing": self.packing,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from the state of a sampler with the same arguments.

        Raises:
            CheckpointError: the state belongs to other data or arguments.
        """
        for name, value in self.state().items():
            if name not in state:
                raise CheckpointError(f"sampler state: {name} is missing; resume from a checkpoint of twoaxis")
            if name != "step" and state[name] != value:
                raise CheckpointError(
                    f"{name}={value!r} in this run, {state[name]!r} in the checkpoint: must be equal to resume; "
                    f"use the {name} of the checkpoint, or start a new run"
                )
        if type(state["step"]) is not int or state["step"] < 0:
            raise CheckpointError(
                f"sampler state: step={state['step']!r}: must be a number from 0; resume from another checkpoint"
            )
        self.step = state["step"]

    def _epoch_order(self, epoch: int) -> np.ndarray:
        if epoch != self._epoch:
            # Raw bits are the same in all versions of numpy; its permutations are not.
            bits = np.random.PCG64(np.random.SeedSequence([self.seed, epoch])).random_raw(self.windows_per_epoch)
            self._epoch, self._order = epoch, np.argsort(bits, kind="stable")
        return self._order


def validation_batches(
    shard: TokenShard,
    batch_size: int,
    seq_len: int,
    n_tokens: int,
    packing: Packing = "isolated",
    answer_cues: Sequence[int] = (),
) -> list[Batch]:
    """Reads the validation windows in text order: `n_tokens`, rounded up to whole windows, at most the whole shard.

    They are spread evenly over the shard and depend on neither seed nor batch size. The last batch may be smaller.

    Raises:
        DataError: the shard is shorter than one window and the token after it.
    """
    if batch_size < 1 or n_tokens < 1:
        raise ConfigError(f"batch_size={batch_size}, n_tokens={n_tokens}: must both be at least 1; correct them")
    available = windows_in(shard, seq_len)
    count = min(available, -(-n_tokens // seq_len))
    windows = np.arange(count) * available // count
    cuts = range(0, count, batch_size)
    return [read_batch(shard, windows[cut : cut + batch_size], seq_len, packing, answer_cues) for cut in cuts]
