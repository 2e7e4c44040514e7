"""From token ids to rows of n-gram tables, exact in int64: windows of ids, multipliers, prime sizes, and three hashes.

Letters: B batch, T position, R cached and new tokens, N longest n-gram, J tables for each length, C = J * (N - 1) columns.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor

from twoaxis.core.errors import ConfigError, problem
from twoaxis.core.layout import PADDING
from twoaxis.ops.causal_conv import NO_DOCUMENT

HashKind = Literal["pcg64", "splitmix64", "polynomial", "int32"]

LARGEST_ID = 2**30
"""Ids are below this, so that multipliers have 32 bits or more, as the bounded draw assumes."""

STRIDE = 10007
"""Between the seeds of layers."""

NOTHING = -1
"""What the bigram hash takes for the token before the first one."""

FACTORS = (36313, 27191)
"""Of a token and of the one before it, in the bigram hash."""

_GAMMA, _WORD = 0x9E3779B97F4A7C15, 2**64


def half_range(ids: int) -> int:
    """Multipliers are odd and below twice this, so that the product with an id is below 2^63."""
    return (2**63 - 1) // ids // 2


def pcg64_multipliers(seed: int, layer: int, order: int, ids: int) -> tuple[int, ...]:
    """Returns the odd multipliers of a layer as `numpy.random.default_rng` draws them.

    Source: deepseek-ai/Engram, engram_demo_v1.py @ fb7f84a, NgramHashMapping

    Args:
        seed: of the model.
        layer: index of the block, counted from 0; it is part of the hash.
        order: longest n-gram.
        ids: ids are below this.

    Example:
        >>> pcg64_multipliers(seed=5, layer=1, order=3, ids=47)
        (17981981399855193, 39165275626450901, 167086653533401717)
    """
    # NumPy promises the raw numbers for good, but not how it bounds them.
    source, half = np.random.PCG64(seed + STRIDE * layer), half_range(ids)
    return tuple(2 * _below(source, half) + 1 for _ in range(order))


def _below(source: "np.random.PCG64", bound: int) -> int:
    """Draws a number below a bound of more than 32 bits without bias; Lemire, arXiv:1805.10941, algorithm 5."""
    product = int(source.random_raw()) * bound
    while product % _WORD < (_WORD - bound) % bound:
        product = int(source.random_raw()) * bound
    return product >> 64


def splitmix64_multipliers(seed: int, index: int, order: int, ids: int) -> tuple[int, ...]:
    """Returns the odd multipliers of the table number `index` of a model; other arguments as of `pcg64_multipliers`.

    Source: transformers 5.24 models/qwen4_exp, Qwen4ExpTextNGramEmbedding

    Example:
        >>> splitmix64_multipliers(seed=1234, index=0, order=2, ids=61)
        (100568829612566729, 48448609024713693)
    """
    base, half = seed + STRIDE * index, half_range(ids)
    words = splitmix64(np.array([(base + _GAMMA * k) % _WORD for k in range(1, order + 1)], dtype=np.uint64))
    return tuple(2 * (int(word) % half) + 1 for word in words)


def splitmix64(states: np.ndarray) -> np.ndarray:
    """Returns one number of the generator from each state, in arithmetic modulo 2^64.

    Source: Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014, figure 16
    """
    z = states + np.uint64(_GAMMA)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def sign_table(rows: int, width: int) -> Int[Tensor, "rows width"]:
    """Returns signs, 1 or -1, that depend on row and column alone."""
    words = -(-width // 64)
    drawn = splitmix64(np.arange(rows * words, dtype=np.uint64)).reshape(rows, words, 1)
    bits = (drawn >> np.arange(64, dtype=np.uint64)) & np.uint64(1)
    signs = 1 - 2 * bits.reshape(rows, -1)[:, :width].astype(np.int8)
    with torch.device("cpu"):
        return torch.from_numpy(np.ascontiguousarray(signs))


Wanted = tuple[tuple[int, int], ...]
"""(smallest size, number of tables) of each length of n-grams, in the order in which sizes are chosen."""


@lru_cache(maxsize=256)
def distinct_primes(wanted: Wanted) -> tuple[int, ...]:
    """Returns for every table the next prime from its smallest size on that no table before it has.

    Example:
        >>> distinct_primes(((97, 2), (101, 2)))
        (97, 101, 103, 107)
    """
    found: dict[int, None] = {}
    for smallest, count in wanted:
        candidate, until = smallest, len(found) + count
        while len(found) < until:
            if candidate not in found and _is_prime(candidate):
                found[candidate] = None
            candidate += 1
    return tuple(found)


def _is_prime(n: int) -> bool:
    if n < 4 or n % 2 == 0 or n % 3 == 0:
        return n in (2, 3)
    return all(n % d and n % (d + 2) for d in range(5, int(n**0.5) + 1, 6))


def token_window(
    ids: Int[Tensor, "B R"],
    tokens: int,
    order: int,
    fill: int,
    documents: Int[Tensor, "B R"] | None = None,
    ends: Sequence[int] = (),
) -> list[Int[Tensor, "B T"]]:
    """Returns for each of the last `tokens` tokens its id and the ids of the `order` - 1 tokens before it.

    A look-back stops for good where another document begins, behind an end, at padding, and at the first token; from there on
    it reads `fill`. An end belongs to the segment that it ends.

    Args:
        ids: of cached and new tokens.
        tokens: how many are new.
        order: longest n-gram.
        fill: what stands beyond the end of a look-back.
        documents: of the same tokens; None when every row is one document.
        ends: ids that end a segment.

    Example:
        >>> [slot.tolist() for slot in token_window(torch.tensor([[7, 8, 9]]), tokens=3, order=2, fill=0)]
        [[[7, 8, 9]], [[0, 7, 8]]]
    """
    padded = F.pad(ids, (order - 1, 0), value=fill)
    known = None if documents is None else F.pad(documents, (order - 1, 0), value=NO_DOCUMENT)
    slots: list[Tensor] = []
    dead: Tensor | None = None
    for back in range(order):
        stop = padded.shape[1] - back
        slot = padded[:, stop - tokens : stop]
        stopped = []
        if known is not None:
            here = known[:, stop - tokens : stop]
            stopped.append(here == PADDING if back == 0 else here != known[:, known.shape[1] - tokens :])
        if back:
            stopped += [slot == end for end in ends]
        for one in stopped:
            dead = one if dead is None else dead | one
        slots.append(slot if dead is None else slot.masked_fill(dead, fill))
    return slots


@dataclass(frozen=True)
class RowHash:
    """Hashes of a window of ids, one for each column, each the row of a table of its own.

    Equation: pcg64, splitmix64: row_(n,j) = (XOR_(k<n) m_k x_(t-k)) mod p_(n,j)
              polynomial: row_(n,j) = sum_(k<n) (V^k mod p_(n,j)) x_(t-k) mod p_(n,j)
              int32: row = (36313 x_t XOR 27191 x_(t-1)) mod (p - 1) in int32, and p - 1 where no token comes before
    Source:   as of the multipliers; LongCat-Flash-Lite, modeling_longcat_ngram.py; KellerJordan/modded-nanogpt @ f411b3d,
              get_bigram_hash

    Attributes:
        kind: the hash.
        order: longest n-gram N; lengths are 2..N.
        sizes: rows p of each table: those of the pairs first, then those of longer n-grams.
        factors: multipliers m_k of each slot, or V alone.
    """

    kind: HashKind
    order: int
    sizes: tuple[int, ...]
    factors: tuple[int, ...]

    @property
    def tables(self) -> int:
        """Tables of each length J."""
        return len(self.sizes) // (self.order - 1)

    @property
    def offsets(self) -> tuple[int, ...]:
        """The first row of each table where all of them are one."""
        return tuple(accumulate(self.sizes[:-1], initial=0))

    @staticmethod
    def of(kind: HashKind, order: int, wanted: Wanted, seed: int, ids: int, layer: int, before: Sequence[Wanted]) -> "RowHash":
        """The hash of one sublayer.

        Args:
            kind: of the hash.
            order: longest n-gram.
            wanted: of its own tables, one pair for each length.
            seed: of the multipliers.
            ids: ids are below this.
            layer: index of its block, counted from 0.
            before: of the hashed tables of earlier sublayers, which have primes of their own.

        Raises:
            ConfigError: sums that int64 cannot hold.

        Example:
            >>> RowHash.of("pcg64", 3, ((97, 2), (101, 2)), seed=5, ids=47, layer=1, before=()).sizes
            (97, 101, 103, 107)
        """
        if kind == "int32":
            return RowHash(kind, order, (wanted[0][0],), FACTORS)
        if kind == "polynomial":
            each = [smallest for smallest, count in wanted for _ in range(count)]
            sizes = tuple(smallest + 2 * index + 1 for index, smallest in enumerate(each))
            if ids * (1 + (order - 1) * max(sizes)) >= 2**63:
                allowed = f"small enough for sums below 2^63 with ids below {ids}"
                raise ConfigError(problem("rows", max(each), allowed, "lower rows, or order"))
            return RowHash(kind, order, sizes, (ids,))
        sizes = distinct_primes((*(pair for earlier in before for pair in earlier), *wanted))
        sizes = sizes[-sum(count for _, count in wanted) :]
        if kind == "pcg64":
            return RowHash(kind, order, sizes, pcg64_multipliers(seed, layer, order, ids))
        return RowHash(kind, order, sizes, splitmix64_multipliers(seed, len(before), order, ids))

    def rows(self, slots: Sequence[Int[Tensor, "B T"]]) -> Int[Tensor, "B T C"]:
        """The row of each column within its own table, for a window of ids, the newest first."""
        if self.kind == "int32":
            return bigram_rows(slots[0], slots[1], self.sizes[0]).unsqueeze(-1)
        if self.kind == "polynomial":
            return torch.cat([self._polynomial(slots, n) for n in range(2, self.order + 1)], dim=-1)
        mixed, found = slots[0] * self.factors[0], []
        for slot, factor in zip(slots[1:], self.factors[1:], strict=True):
            mixed = mixed ^ (slot * factor)
            found.append(mixed)
        sizes = _constant(self.sizes, slots[0]).view(self.order - 1, self.tables)
        return (torch.stack(found, dim=-1).unsqueeze(-1) % sizes).flatten(-2)

    def _polynomial(self, slots: Sequence[Tensor], n: int) -> Tensor:
        sizes = self.sizes[(n - 2) * self.tables : (n - 1) * self.tables]
        total = slots[0].unsqueeze(-1)
        for k in range(1, n):
            powers = _constant([pow(self.factors[0], k, size) for size in sizes], slots[0])
            total = total + slots[k].unsqueeze(-1) * powers
        return total % _constant(sizes, slots[0])


def bigram_rows(ids: Int[Tensor, "B T"], before: Int[Tensor, "B T"], rows: int) -> Int[Tensor, "B T"]:
    """The bigram hash of `RowHash`, whose products wrap around as those of int32 do; `NOTHING` comes before a first token."""
    mixed = _int32(ids * FACTORS[0]) ^ _int32(before * FACTORS[1])
    return torch.where(before == NOTHING, rows - 1, mixed % (rows - 1))


def sign_rows(ids: Int[Tensor, "B T"], before: Int[Tensor, "B T"], rows: int) -> Int[Tensor, "B T"]:
    """The row of a table of signs for each pair of tokens, row 0 where no token comes before."""
    return torch.where(before == NOTHING, 0, (ids ^ before) % rows)


def _int32(x: Tensor) -> Tensor:
    return ((x + 2**31) & (2**32 - 1)) - 2**31


def _constant(values: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=like.device)
