"""Steps of generation on static caches: every cache keeps its size and keys are written into rings, so one program runs all.

Letters: B batch, D width.
"""

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor

from twoaxis.core.key_value_cache import KeyValueCache
from twoaxis.core.layout import PADDING, TokenLayout
from twoaxis.model.cache import DecoderCache, carried, columns, parts, walk
from twoaxis.model.decoder import Decoder
from twoaxis.ops.precision import ISOLATED

ROOM_TOKENS = 256
"""Rings have room for a multiple of so many tokens, so that one program serves prompts of many lengths."""

Program = Callable[[Decoder, Tensor, Tensor, list[Tensor]], tuple[Tensor, list[Tensor]]]

_PROGRAMS: WeakKeyDictionary[Decoder, dict[Any, Program]] = WeakKeyDictionary()
"""Of each model; they are given it, for one that held it would keep it alive."""


class StaticSteps:
    """The steps of some rows, each of one token for every row.

    Args:
        model: the decoder.
        cache: behind some tokens; rows may be padded on the left. Their histories are full.
        tokens: that each row will hold at most, with its padding.
        compile: whether the step is compiled, once for caches of the same sizes; else it runs as it is, the reference.
    """

    def __init__(self, model: Decoder, cache: DecoderCache, tokens: int, compile: bool = True) -> None:
        assert cache.positions is not None
        self._model, self._positions = model, cache.positions.clone()
        room = min(-(-tokens // ROOM_TOKENS) * ROOM_TOKENS, max(tokens, model.config.max_seq_len))
        slot = torch.tensor(columns(cache), device=cache.positions.device)
        static = walk(lambda at: _static(at[0], room, slot), [carried(cache)])
        self._leaves = _leaves(static)
        self._program = _program(walk(_empty, [static]), room)
        if compile:
            key = (room, *((tuple(x.shape), x.stride(), x.dtype) for x in (self._positions, *self._leaves)))
            programs = _PROGRAMS.setdefault(model, {})
            if key not in programs:
                programs[key] = torch.compile(self._program, fullgraph=True, dynamic=False, **ISOLATED)
            self._program = programs[key]

    def hidden(self, tokens: Int[Tensor, "B 1"]) -> Float[Tensor, "B 1 D"]:
        """The outputs of the stack for the next token of each row."""
        self._positions = self._positions + 1
        hidden, self._leaves = self._program(self._model, tokens, self._positions, self._leaves)
        return hidden


def histories_are_full(before: DecoderCache, after: DecoderCache) -> bool:
    """Whether the caches around a step of one token show that no history grows any more, keys and values aside."""

    def sizes(cache: DecoderCache) -> list[torch.Size]:
        return [part.shape for part in parts(carried(cache)) if isinstance(part, Tensor)]

    return sizes(before) == sizes(after)


def _program(nested: Any, room: int) -> Program:
    """One step as a function of tensors alone."""

    def step(model: Decoder, tokens: Tensor, positions: Tensor, leaves: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        given = iter(leaves)
        mixers = walk(lambda at: _given(at[0], given), [nested])
        # By their age, whether the tokens before this one are there.
        there = torch.arange(room, 0, -1, device=tokens.device) <= positions
        documents = torch.where(there, 0, PADDING).expand(len(tokens), -1)
        cache = DecoderCache(positions=positions, documents=documents, **mixers)
        layout = TokenLayout(positions, torch.zeros_like(tokens))
        hidden, after = model.hidden(model.embed(tokens), layout, cache, tokens=tokens)
        assert after is not None
        following = _leaves(carried(after))
        return hidden, [_as_large(new, old) for new, old in zip(following, leaves, strict=True)]

    return step


def _static(part: Any, room: int, slot: Tensor) -> Any:
    return part.static(room, slot) if isinstance(part, KeyValueCache) else part.clone()


def _leaves(nested: Any) -> list[Tensor]:
    """All tensors of nested caches, in order; of keys that are rewritten with each token, keys and values."""
    found: list[Tensor] = []
    for part in parts(nested):
        found.extend(part.past() if isinstance(part, KeyValueCache) else (part,))
    return found


def _empty(at: Sequence[Any]) -> Any:
    """What stands for a part without its memory."""
    return KeyValueCache() if isinstance(at[0], KeyValueCache) else at[0].to("meta")


def _given(part: Any, leaves: Any) -> Any:
    return KeyValueCache.of(next(leaves), next(leaves)) if isinstance(part, KeyValueCache) else next(leaves)


def _as_large(new: Tensor, old: Tensor) -> Tensor:
    """Keys and values that have grown by a token give up the oldest one."""
    return new if new.shape == old.shape else new[:, :, -old.shape[2] :].contiguous()
