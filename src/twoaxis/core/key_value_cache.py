"""Key-value caches: an immutable value over a buffer that grows in place if no other value uses the room, and a ring.

Letters: B batch, N rows of it, G kv-heads, S new keys, C all keys that a query may see, K key width, V value width.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from twoaxis.core.measure import element_bytes

Keys = Float[Tensor, "B G S K"]
Values = Float[Tensor, "B G S V"]
AllKeys = Float[Tensor, "B G C K"]
AllValues = Float[Tensor, "B G C V"]


class _Buffer:
    """Storage for keys and values, of which the first `filled` entries belong to some cache value."""

    def __init__(self, keys: Tensor, values: Tensor, capacity: int) -> None:
        self.keys, self.values = (x.new_empty(*x.shape[:2], capacity, x.shape[3]) for x in (keys, values))
        self.filled = 0
        self.append(keys, values)

    @property
    def capacity(self) -> int:
        return self.keys.shape[2]

    def append(self, keys: Tensor, values: Tensor) -> None:
        stop = self.filled + keys.shape[2]
        self.keys[:, :, self.filled : stop] = keys
        self.values[:, :, self.filled : stop] = values
        self.filled = stop


@dataclass(frozen=True, eq=False)
class KeyValueCache:
    """The keys and values visible to later queries: the last `window - 1`, or all if `window` is None."""

    window: int | None = None
    _buffer: _Buffer | None = None
    _start: int = 0
    _stop: int = 0

    @property
    def length(self) -> int:
        """Number of cached tokens."""
        return self._stop - self._start

    @property
    def live_bytes(self) -> int:
        """Bytes of the cached entries."""
        if self._buffer is None:
            return 0
        both = self._buffer.keys, self._buffer.values
        return self.length * sum(x.shape[0] * x.shape[1] * x.shape[3] * element_bytes(x) for x in both)

    @staticmethod
    def of(keys: AllKeys, values: AllValues) -> "KeyValueCache":
        """The cache of these keys and values, without a copy: for a mixer that rewrites all of them with each token."""
        return KeyValueCache(None, _Whole(keys, values), 0, keys.shape[2])

    def past(self) -> tuple[AllKeys, AllValues]:
        """The cached keys and values; there must be some."""
        assert self._buffer is not None
        past = slice(self._start, self._stop)
        return self._buffer.keys[:, :, past], self._buffer.values[:, :, past]

    def extend(self, keys: Keys, values: Values) -> tuple[AllKeys, AllValues, "KeyValueCache"]:
        """Returns all keys and values visible to the new tokens, and the next cache."""
        if torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad):
            buffer, start = self._copied(keys, values, room=0), 0
        elif self._buffer is not None and self._fits(keys.shape[2]):
            buffer, start = self._buffer, self._start
            buffer.append(keys, values)
        else:
            buffer, start = self._copied(keys, values, room=max(64, self.length + keys.shape[2])), 0
        stop = buffer.filled
        kept = stop - start if self.window is None else min(stop - start, self.window - 1)
        cache = KeyValueCache(self.window, buffer, stop - kept, stop)
        return buffer.keys[:, :, start:stop], buffer.values[:, :, start:stop], cache._compact()

    def arranged(self, of_keys: Int[Tensor, "_ C"] | None) -> Int[Tensor, "_ C"] | None:
        """Puts what belongs to the visible tokens, oldest first, in the order of the keys."""
        return of_keys

    @property
    def rewritten(self) -> bool:
        """Whether the mixer rewrites all keys with each token."""
        return isinstance(self._buffer, _Whole)

    def static(self, rows: int, capacity: int) -> "KeyValueCache | KeyValueRing":
        """Zeros for so many rows of a cache whose size stays: a ring of `capacity` tokens, or of the window if it is smaller.

        Where the mixer rewrites all keys with each token, a cache of `capacity` tokens.
        """
        size = capacity if self.rewritten or self.window is None else min(capacity, self.window)
        keys, values = (x.new_zeros(rows, x.shape[1], size, x.shape[3]) for x in self.past())
        return KeyValueCache.of(keys, values) if self.rewritten else KeyValueRing(keys, values)

    def rows(self, rows: Int[Tensor, " N"]) -> "KeyValueCache":
        """The cache of these rows of the batch, in new storage."""
        if self._buffer is None:
            return self
        keys, values = (past[rows] for past in self.past())
        if self.rewritten:
            return KeyValueCache.of(keys, values)
        return KeyValueCache(self.window, _Buffer(keys, values, self.length + 64), 0, self.length)

    def last(self, tokens: int) -> "KeyValueCache":
        """The cache of at most the last `tokens` tokens."""
        return replace(self, _start=max(self._start, self._stop - tokens))

    @staticmethod
    def join(caches: Sequence["KeyValueCache"]) -> "KeyValueCache":
        """Concatenates the rows of caches that are not empty; shorter ones are padded with zeros on the left."""
        length = max(cache.length for cache in caches)
        keys, values = zip(*(cache._padded(length) for cache in caches), strict=True)
        joined = _Buffer(torch.cat(keys), torch.cat(values), length + 64)
        return KeyValueCache(caches[0].window, joined, 0, length)

    def _padded(self, length: int) -> tuple[Tensor, Tensor]:
        (keys, values), padding = self.past(), (0, 0, length - self.length, 0)
        return F.pad(keys, padding), F.pad(values, padding)

    def _fits(self, tokens: int) -> bool:
        # Entries after this value belong to another continuation.
        assert self._buffer is not None
        if self._buffer.keys.is_inference() and not torch.is_inference_mode_enabled():
            return False
        return self._buffer.filled == self._stop and self._stop + tokens <= self._buffer.capacity

    def _copied(self, keys: Tensor, values: Tensor, room: int) -> _Buffer:
        if self._buffer is not None:
            past_keys, past_values = self.past()
            keys, values = torch.cat((past_keys, keys), dim=2), torch.cat((past_values, values), dim=2)
        if room == 0:
            return _Whole(keys, values)
        return _Buffer(keys, values, keys.shape[2] + room)

    def _compact(self) -> "KeyValueCache":
        """Frees the buffer of a long prefill if the window keeps little of it."""
        if self.window is None or self._buffer is None or self._buffer.capacity <= max(256, 4 * self.window):
            return self
        buffer = _Buffer(*self.past(), self.length + max(64, self.window))
        return KeyValueCache(self.window, buffer, 0, self.length)


@dataclass(frozen=True, eq=False)
class KeyValueRing:
    """Keys and values of the last tokens in room that stays, where each token replaces the oldest one of its row.

    Not a value like `KeyValueCache`: what it was before is written over. So one program serves every step.

    Attributes:
        keys: of the token at position p at the place p modulo their number.
        values: likewise.
        positions: of the next token of each row; only a step needs them.
    """

    keys: AllKeys
    values: AllValues
    positions: Int[Tensor, " B"] | None = None

    @property
    def length(self) -> int:
        """Number of places; those of no token yet hold anything finite."""
        return self.keys.shape[2]

    def past(self) -> tuple[AllKeys, AllValues]:
        """Keys and values at all places."""
        return self.keys, self.values

    def put(self, rows: slice, cache: KeyValueCache, last: Int[Tensor, "N 1"]) -> None:
        """Copies a cache to these rows; `last` is the position of the last token of each."""
        cache = cache.last(self.length)
        # Padding lies before position 0; its places are those of no token.
        places = (last - torch.arange(cache.length - 1, -1, -1, device=last.device)) % self.length
        for into, given in zip(self.past(), cache.past(), strict=True):
            into[rows] = 0
            into[rows].scatter_(2, places[:, None, :, None].expand_as(given), given)

    def extend(self, keys: Keys, values: Values) -> tuple[AllKeys, AllValues, "KeyValueRing"]:
        """Writes one token of each row, and returns all keys and values, and the next cache."""
        assert self.positions is not None
        rows = torch.arange(len(keys), device=keys.device)
        places = self.positions % self.length
        self.keys[rows, :, places] = keys[:, :, 0]
        self.values[rows, :, places] = values[:, :, 0]
        return self.keys, self.values, replace(self, positions=self.positions + 1)

    def arranged(self, of_keys: Int[Tensor, "_ C"] | None) -> Int[Tensor, "_ C"] | None:
        """Puts what belongs to the visible tokens, oldest first, in the order of the keys, behind `extend`."""
        if of_keys is None:
            return None
        assert self.positions is not None
        places = torch.arange(self.length, device=of_keys.device)
        return of_keys.expand(len(self.keys), -1).gather(1, (places - self.positions[:, None]) % self.length)


class _Whole(_Buffer):
    """A buffer that is the given tensors without a copy, for gradients; it has no room."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values
        self.filled = keys.shape[2]
