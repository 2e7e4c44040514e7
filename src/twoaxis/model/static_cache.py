"""Steps of generation on static caches: every cache keeps its size and keys are written into rings, so one program runs all.

Each row has a place and a position of its own, so that rows come and go without another program.

Letters: B batch, N rows, D width.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from twoaxis.core.errors import ConfigError
from twoaxis.core.key_value_cache import KeyValueCache, KeyValueRing
from twoaxis.core.layout import PADDING, TokenLayout
from twoaxis.model.cache import DecoderCache, carried, parts, select_rows, walk
from twoaxis.model.decoder import Decoder
from twoaxis.ops.cpu import library, step_kernels
from twoaxis.ops.precision import ISOLATED

ROOM_TOKENS = 256
"""Rings have room for a multiple of so many tokens, so that one program serves prompts of many lengths."""

ROOM_FACTOR = 4
"""From one room to the next where rows come and go: few programs, and attention over at most so many times the tokens."""

PROBE_TOKENS = 16
"""Tokens of the first attempt to fill every history."""

Program = Callable[[Decoder, Tensor, Tensor, list[Tensor]], Tensor]

_PROGRAMS: WeakKeyDictionary[Decoder, dict[Any, Program]] = WeakKeyDictionary()
"""Of each model; they are given it, for one that held it would keep it alive."""


class StaticRows:
    """Rows on static caches that step together, each as it would alone; a place without a row runs too, and concerns no other.

    Cost: a row that is put or moved copies its own cache; another room copies all.

    Args:
        model: the decoder.
        like: a cache of the model whose histories are full.
        counts: the numbers of rows that may step together, in rising order; the last is the number of places.
        rooms: the numbers of tokens for which rings may have room, in rising order.
        compile: whether steps are compiled, once for each number of rows and each room; else they run as they are.
    """

    def __init__(
        self, model: Decoder, like: DecoderCache, counts: Sequence[int], rooms: Sequence[int], compile: bool = True
    ) -> None:
        assert like.positions is not None
        self.counts, self.rooms = tuple(counts), tuple(rooms)
        self._model, self._compile = model, compile
        first = torch.zeros(1, dtype=torch.long, device=like.positions.device)
        self._like = select_rows(carried(like), first, len(like.positions))
        self._take(self.rooms[0])

    def programs(self) -> Iterator[tuple[int, int]]:
        """Runs a step of every size once, which compiles it; yields its rows and its room. No row may be there."""
        device = self._model.embedding.weight.device
        for room in self.rooms:
            self._take(room)
            for count in self.counts:
                # Two tensors: a program for one tensor that is both would be another.
                tokens, positions = torch.zeros(2, count, 1, dtype=torch.long, device=device).unbind()
                self.hidden(tokens, positions)
                yield count, room
        self._take(self.rooms[0])

    def fit(self, tokens: int) -> None:
        """Takes the smallest room for rows of so many tokens; no row that is there may have more."""
        room = next((room for room in self.rooms if room >= tokens), self.rooms[-1])
        if room == self._room:
            return
        before = self._caches
        self._take(room)
        walk(_copy_all, [before, self._caches])

    def put(self, row: int, cache: DecoderCache, rows: int = 1) -> None:
        """Copies a cache of so many rows to the places from `row` on."""
        assert cache.positions is not None
        places, last = slice(row, row + rows), cache.positions.expand(rows, 1)
        walk(lambda at: _put(at[0], at[1], places, last), [carried(cache), self._caches])

    def move(self, row: int, to: int) -> None:
        """Copies a row to another place."""
        for leaf in self._leaves:
            leaf[to] = leaf[row]

    def hidden(self, tokens: Int[Tensor, "N 1"], positions: Int[Tensor, "N 1"]) -> Float[Tensor, "N 1 D"]:
        """The outputs of the stack for the next token of each of the first rows, at this position."""
        rows = len(tokens)
        count = next(count for count in self.counts if count >= rows)
        if count > rows:
            # A first token, in front of which nothing is seen.
            tokens, positions = (F.pad(x, (0, 0, 0, count - rows)) for x in (tokens, positions))
        if count not in self._steps:
            leaves = [leaf[:count] for leaf in self._leaves]
            self._steps[count] = self._program(leaves), leaves
        program, leaves = self._steps[count]
        return program(self._model, tokens, positions, leaves)[:rows]

    def _take(self, room: int) -> None:
        """Makes empty caches with this room."""
        places = self.counts[-1]

        def static(at: Sequence[Any]) -> Any:
            (part,) = at
            return part.static(places, room) if isinstance(part, KeyValueCache) else part.new_zeros(places, *part.shape[1:])

        self._room, self._caches = room, walk(static, [self._like])
        self._leaves = _leaves(self._caches)
        self._steps: dict[int, tuple[Program, list[Tensor]]] = {}

    def _program(self, leaves: Sequence[Tensor]) -> Program:
        program = _step(walk(_empty, [self._caches]), _longest(self._caches))
        if not self._compile:
            return program
        on_cpu = leaves[0].device.type == "cpu"
        kernels = on_cpu and library.served()
        key = (self._room, kernels, *((tuple(x.shape), x.stride(), x.dtype) for x in leaves))
        programs = _PROGRAMS.setdefault(self._model, {})
        if key not in programs:
            options: dict[str, Any] = {"guard_filter_fn": _needed_guards}
            if on_cpu:
                # A step is short, and the calls of its kernels from Python take a seventh of it.
                options["cpp_wrapper"] = True
            if kernels:
                options["post_grad_custom_post_pass"] = step_kernels.replace_by_kernels()
            programs[key] = torch.compile(program, fullgraph=True, dynamic=False, options=options, **ISOLATED)
        return programs[key]


OF_CODE = ("TYPE_MATCH", "DUPLICATE_INPUT", "CLOSURE_MATCH", "MODULE_MATCH", "CLASS_MATCH", "BUILTIN_MATCH", "HASATTR")
OF_CODE += ("SEQUENCE_LENGTH", "DICT_KEYS_MATCH", "NOT_PRESENT_IN_GENERIC_DICT")
"""Guards of the compiler that ask whether code is still what it was."""

OF_ARGUMENTS = re.compile(r"\b(model|tokens|positions|leaves)\b")
"""In the names of what guards look at."""


def _needed_guards(guards: Sequence[Any]) -> list[bool]:
    """Which guards are looked at before each step: those of the model, and of values that may change.

    A third asks whether functions and classes are still the same, or the nested parts of a cache, which each program has for
    itself; these would take a tenth of a step.
    """
    return [guard.guard_type not in OF_CODE or OF_ARGUMENTS.search(guard.name) is not None for guard in guards]


class StaticSteps:
    """The steps of some rows, each of one token for every row.

    Args:
        model: the decoder.
        cache: behind some tokens; rows may be padded on the left. Their histories are full.
        rows: their number.
        tokens: that each row will hold at most, with its padding.
        compile: as of `StaticRows`.
    """

    def __init__(self, model: Decoder, cache: DecoderCache, rows: int, tokens: int, compile: bool = True) -> None:
        assert cache.positions is not None
        self._positions = cache.positions.expand(rows, 1).clone()
        room = min(-(-tokens // ROOM_TOKENS) * ROOM_TOKENS, max(tokens, model.config.max_seq_len))
        self.rows = StaticRows(model, cache, (rows,), (room,), compile)
        self.rows.put(0, cache, rows)

    def hidden(self, tokens: Int[Tensor, "B 1"]) -> Float[Tensor, "B 1 D"]:
        """The outputs of the stack for the next token of each row."""
        self._positions = self._positions + 1
        return self.rows.hidden(tokens, self._positions)


def check_compiler(device: torch.device) -> None:
    """Checks that steps can be compiled for this device.

    Raises:
        ConfigError: a CPU without a C++ compiler.
    """
    if device.type != "cpu":
        return
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise ConfigError(
            "compile: no C++ compiler found: must have one to compile for a CPU; install g++, set CXX, or leave compile out"
        ) from None


def histories_are_full(before: DecoderCache, after: DecoderCache) -> bool:
    """Whether the caches around a step of one token show that no history grows any more, keys and values aside."""

    def sizes(cache: DecoderCache) -> list[torch.Size]:
        return [part.shape for part in parts(carried(cache)) if isinstance(part, Tensor)]

    return sizes(before) == sizes(after)


def full_cache(model: Decoder, tokens: int) -> DecoderCache:
    """A cache of one row whose histories are full, or as full as so many tokens, at least 2, make them."""
    held = PROBE_TOKENS
    while True:
        held = min(held, tokens)
        caches = [model.new_cache()]
        for start, stop in ((0, held - 1), (held - 1, held)):
            layout = TokenLayout.contiguous(stop - start, start, model.embedding.weight.device)
            given = torch.zeros_like(layout.positions)
            _, following = model.hidden(model.embed(given), layout, caches[-1], tokens=given)
            assert following is not None
            caches.append(following)
        if held == tokens or histories_are_full(*caches[1:]):
            return caches[-1]
        held *= 4


def rooms(like: DecoderCache, tokens: int) -> tuple[int, ...]:
    """The rooms of rings for rows of at most so many tokens; a window needs no more room than itself."""
    held = [part for part in parts(carried(like)) if isinstance(part, KeyValueCache)]
    most = max((part.static(1, tokens).length for part in held), default=1)
    found, room = [], ROOM_TOKENS
    while room < most:
        found.append(room)
        room *= ROOM_FACTOR
    return (*found, most)


def _step(nested: Any, seen: int) -> Program:
    """One step as a function of tensors alone, which writes the next caches over the given ones."""

    def step(model: Decoder, tokens: Tensor, positions: Tensor, leaves: list[Tensor]) -> Tensor:
        given = iter(leaves)
        mixers = walk(lambda at: _given(at[0], given, positions), [nested])
        # By their age, whether the tokens before this one are there.
        there = torch.arange(seen, 0, -1, device=tokens.device) <= positions
        documents = torch.where(there, 0, PADDING)
        cache = DecoderCache(positions=positions, documents=documents, **mixers)
        layout = TokenLayout(positions, torch.zeros_like(tokens))
        hidden, after = model.hidden(model.embed(tokens), layout, cache, tokens=tokens)
        assert after is not None
        # All before any is written over.
        following = walk(lambda at: _following(at[0]), [carried(after)])
        walk(lambda at: _write(at[0], at[1]), [following, mixers])
        return hidden

    return step


def _leaves(nested: Any) -> list[Tensor]:
    """All tensors of nested caches, in order."""
    found: list[Tensor] = []
    for part in parts(nested):
        found.extend((part,) if isinstance(part, Tensor) else part.past())
    return found


def _longest(nested: Any) -> int:
    """The most tokens that a part may hold."""
    held = [(*part.shape, 1, 1)[1] if isinstance(part, Tensor) else part.length for part in parts(nested)]
    return max(held, default=1)


def _empty(at: Sequence[Any]) -> Any:
    """What stands for a part without its memory."""
    (part,) = at
    if isinstance(part, KeyValueRing):
        return KeyValueRing(*(x.to("meta") for x in part.past()))
    return part.to("meta") if isinstance(part, Tensor) else KeyValueCache()


def _given(part: Any, leaves: Iterator[Tensor], positions: Tensor) -> Any:
    if isinstance(part, Tensor):
        return next(leaves)
    keys, values = next(leaves), next(leaves)
    return KeyValueRing(keys, values, positions[:, 0]) if isinstance(part, KeyValueRing) else KeyValueCache.of(keys, values)


def _following(part: Any) -> Any:
    # Another part may be the same tensor, or a view of one that is written over first.
    return part.clone() if isinstance(part, Tensor) else part


def _write(new: Any, old: Any) -> None:
    if isinstance(new, Tensor):
        old.copy_(new)
    elif isinstance(new, KeyValueCache):
        for given, into in zip(new.past(), old.past(), strict=True):
            # They have grown by a token, and give up the oldest one.
            into.copy_(given[:, :, -into.shape[2] :])


def _put(part: Any, into: Any, rows: slice, last: Int[Tensor, "N 1"]) -> None:
    if isinstance(into, KeyValueRing):
        into.put(rows, part, last)
    elif isinstance(into, KeyValueCache):
        for given, static in zip(part.past(), into.past(), strict=True):
            _fill(static[rows], given, 2)
    else:
        _fill(into[rows], part, 1)


def _copy_all(at: Sequence[Any]) -> None:
    """To another room: rings from the first place, since no row has gone round; all else from the last token."""
    part, into = at
    if isinstance(part, Tensor):
        into.copy_(part)
        return
    room = min(part.length, into.length)
    kept = slice(room) if isinstance(part, KeyValueRing) else slice(-room, None)
    for given, static in zip(part.past(), into.past(), strict=True):
        static[:, :, kept] = given[:, :, kept]


def _fill(into: Tensor, given: Tensor, axis: int) -> None:
    """Copies the last tokens behind zeros: mixers start from these before the first token."""
    if given.shape[1:] == into.shape[1:]:
        into.copy_(given)
    else:
        into.zero_().narrow(axis, into.shape[axis] - given.shape[axis], given.shape[axis]).copy_(given)
