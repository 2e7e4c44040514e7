"""The key-value cache: an immutable value on top of a buffer that grows in place while nobody can notice.

Letters: B batch, N rows of it, G kv-heads, S new keys, C all keys that a query may see, K key width.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

Keys = Float[Tensor, "B G S K"]
AllKeys = Float[Tensor, "B G C K"]


class _Buffer:
    """Storage for keys and values; `filled` tells which entries some cache value already owns."""

    def __init__(self, keys: Tensor, values: Tensor, capacity: int) -> None:
        B, G, _, K = keys.shape
        self.keys = keys.new_empty(B, G, capacity, K)
        self.values = values.new_empty(B, G, capacity, K)
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
    """The keys and values that later queries may see: the last `window - 1`, or all of them.

    Attributes:
        window: the attention window, which includes the query, or None.
    """

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
        """Bytes of the entries that later queries may see."""
        if self._buffer is None:
            return 0
        keys = self._buffer.keys
        return 2 * keys.shape[0] * keys.shape[1] * self.length * keys.shape[3] * keys.element_size()

    def extend(self, keys: Keys, values: Keys) -> tuple[AllKeys, AllKeys, "KeyValueCache"]:
        """Returns all keys and values that the new tokens may see, and the cache after them."""
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

    def rows(self, rows: Int[Tensor, " N"]) -> "KeyValueCache":
        """The cache of these rows of the batch, in storage of its own."""
        if self._buffer is None:
            return self
        past = slice(self._start, self._stop)
        keys, values = self._buffer.keys[:, :, past][rows], self._buffer.values[:, :, past][rows]
        return KeyValueCache(self.window, _Buffer(keys, values, self.length + 64), 0, self.length)

    def last(self, tokens: int) -> "KeyValueCache":
        """The cache of at most this many last tokens."""
        return replace(self, _start=max(self._start, self._stop - tokens))

    @staticmethod
    def join(caches: Sequence["KeyValueCache"]) -> "KeyValueCache":
        """The rows of all caches, which hold tokens, below each other; zeros stand before the tokens of shorter ones."""
        length = max(cache.length for cache in caches)
        keys, values = zip(*(cache._padded(length) for cache in caches), strict=True)
        joined = _Buffer(torch.cat(keys), torch.cat(values), length + 64)
        return KeyValueCache(caches[0].window, joined, 0, length)

    def _padded(self, length: int) -> tuple[Tensor, Tensor]:
        assert self._buffer is not None
        past, before = slice(self._start, self._stop), (0, 0, length - self.length, 0)
        return F.pad(self._buffer.keys[:, :, past], before), F.pad(self._buffer.values[:, :, past], before)

    def _fits(self, tokens: int) -> bool:
        # A buffer filled beyond this value belongs to another continuation: writing there would corrupt it.
        assert self._buffer is not None
        if self._buffer.keys.is_inference() and not torch.is_inference_mode_enabled():
            return False
        return self._buffer.filled == self._stop and self._stop + tokens <= self._buffer.capacity

    def _copied(self, keys: Tensor, values: Tensor, room: int) -> _Buffer:
        if self._buffer is not None:
            past = slice(self._start, self._stop)
            keys = torch.cat((self._buffer.keys[:, :, past], keys), dim=2)
            values = torch.cat((self._buffer.values[:, :, past], values), dim=2)
        if room == 0:
            return _Whole(keys, values)
        return _Buffer(keys, values, keys.shape[2] + room)

    def _compact(self) -> "KeyValueCache":
        """Lets go of a long prefill of which the window keeps little."""
        if self.window is None or self._buffer is None or self._buffer.capacity <= max(256, 4 * self.window):
            return self
        past = slice(self._start, self._stop)
        keys, values = self._buffer.keys[:, :, past], self._buffer.values[:, :, past]
        return KeyValueCache(self.window, _Buffer(keys, values, self.length + max(64, self.window)), 0, self.length)


class _Whole(_Buffer):
    """A buffer made of given tensors without a copy, so that gradients flow through it; it has no room."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values
        self.filled = keys.shape[2]
