"""Steps of generation as one compiled program: every cache keeps its size, and keys are written into rings.

Letters: B batch, D width.
"""

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor

from twoaxis.core.errors import ConfigError, problem
from twoaxis.core.key_value_cache import KeyValueCache
from twoaxis.core.layout import PADDING, TokenLayout
from twoaxis.model.cache import DecoderCache, walk
from twoaxis.model.decoder import Decoder

ROOM_TOKENS = 256
"""Rings have room for a multiple of so many tokens, so that one program serves prompts of many lengths."""

Program = Callable[[Tensor, Tensor, list[Tensor]], tuple[Tensor, list[Tensor]]]

_PROGRAMS: WeakKeyDictionary[Decoder, dict[Any, Program]] = WeakKeyDictionary()


class CompiledSteps:
    """The steps of some rows, each of one token for every row.

    Args:
        model: the decoder.
        cache: behind some tokens; rows may be padded on the left. Histories must be full: see `is_full`.
        tokens: that each row will hold at most, with its padding.
    """

    def __init__(self, model: Decoder, cache: DecoderCache, tokens: int) -> None:
        assert cache.positions is not None
        room = min(-(-tokens // ROOM_TOKENS) * ROOM_TOKENS, max(tokens, model.config.max_seq_len))
        held = cache.length if cache.documents is None else cache.documents.shape[1]
        slot = torch.tensor(held, device=cache.positions.device)
        self._positions = cache.positions.clone()
        fixed = walk(lambda parts: _fixed(parts[0], room, slot), [(cache.sublayers, cache.ends, cache.embedding)])
        self._leaves = _leaves(fixed)
        programs = _PROGRAMS.setdefault(model, {})
        key = (room, *((tuple(x.shape), x.stride(), x.dtype) for x in (self._positions, *self._leaves)))
        if key not in programs:
            programs[key] = torch.compile(_program(model, walk(_empty, [fixed]), room), fullgraph=True, dynamic=False)
        self._program = programs[key]

    def hidden(self, tokens: Int[Tensor, "B 1"]) -> Float[Tensor, "B 1 D"]:
        """The outputs of the stack for the next token of each row."""
        self._positions = self._positions + 1
        hidden, self._leaves = self._program(tokens, self._positions, self._leaves)
        return hidden


def is_full(before: DecoderCache, after: DecoderCache) -> bool:
    """Whether the caches around a step show that no history grows any more, those of keys and values aside."""


    def histories(cache: DecoderCache) -> list[torch.Size]:
        found = _parts((cache.sublayers, cache.ends, cache.embedding))
        return [part.shape for part in found if isinstance(part, Tensor)]

    return histories(before) == histories(after)


def _program(model: Decoder, nested: Any, room: int) -> Program:
    """One step as a function of tensors alone."""

    def step(tokens: Tensor, positions: Tensor, leaves: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        given = iter(leaves)
        sublayers, ends, embedding = walk(lambda parts: _given(parts[0], given), [nested])
        # By their age, whether the tokens before this one are there.
        there = torch.arange(room, 0, -1, device=tokens.device) <= positions
        documents = torch.where(there, 0, PADDING).expand(len(tokens), -1)
        cache = DecoderCache(sublayers, ends, positions=positions, documents=documents, embedding=embedding)
        layout = TokenLayout(positions, torch.zeros_like(tokens))
        hidden, after = model.hidden(model.embed(tokens), layout, cache, tokens=tokens)
        assert after is not None
        following = _leaves((after.sublayers, after.ends, after.embedding))
        return hidden, [_as_large(new, old) for new, old in zip(following, leaves, strict=True)]

    return step


def _fixed(part: Any, room: int, slot: Tensor) -> Any:
    return part.fixed(room, slot) if isinstance(part, KeyValueCache) else part.clone()


def _leaves(nested: Any) -> list[Tensor]:
    """All tensors of nested caches, in order; of keys that are rewritten with each token, keys and values."""
    found: list[Tensor] = []
    for part in _parts(nested):
        found.extend(part.past() if isinstance(part, KeyValueCache) else (part,))
    return found


def _parts(nested: Any) -> list[Any]:
    found: list[Any] = []

    def note(parts: Sequence[Any]) -> Any:
        found.append(parts[0])
        return parts[0]

    walk(note, [nested])
    return found


def _empty(parts: Sequence[Any]) -> Any:
    """What stands for a part without its memory."""
    return KeyValueCache() if isinstance(parts[0], KeyValueCache) else torch.empty(0)


def _given(part: Any, leaves: Any) -> Any:
    return KeyValueCache.of(next(leaves), next(leaves)) if isinstance(part, KeyValueCache) else next(leaves)


def _as_large(new: Tensor, old: Tensor) -> Tensor:
    """Keys that have grown by a token give up the oldest one."""
    if new.shape == old.shape:
        return new
    return new[:, :, -old.shape[2] :].contiguous()
