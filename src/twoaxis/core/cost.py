"""The cost of a forward pass, declared next to the mathematics and tested against measurement."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """The size of one forward pass: sequences, tokens in each, and bytes of one element."""

    batch: int
    tokens: int
    element_bytes: int = 4

    @property
    def total_tokens(self) -> int:
        """Tokens in the whole batch."""
        return self.batch * self.tokens

    @property
    def statistics_bytes(self) -> int:
        """Bytes of one statistic."""
        return max(STATISTICS_BYTES, self.element_bytes)


@dataclass(frozen=True)
class Cost:
    """The cost of one forward pass of one part of the model at a `Shape`.

    Attributes:
        params: parameters, a count.
        matmul_flops: multiply and add in matrix products with parameters, a count.
        pair_flops: multiply and add in products of queries with visible keys, and of the weights with the values; a count.
        elementwise_flops: everything else that grows with tokens times width, a count by formula.
        saved_bytes: saved for the backward pass beyond parameters, inputs and outputs, by sublayers of other libraries, which
            cannot be traced; those of this library are measured.
        cache_bytes: carried to the next token after `Shape.tokens` tokens, by the same sublayers.
        shared_params: parameters that this part uses and another part counts; a sum of parts counts them once for each use.
        table_params: those of `params` in tables, of which each token reads few rows.
    """

    params: int = 0
    matmul_flops: int = 0
    pair_flops: int = 0
    elementwise_flops: int = 0
    saved_bytes: int = 0
    cache_bytes: int = 0
    shared_params: int = 0
    table_params: int = 0

    @property
    def flops(self) -> int:
        """All floating-point operations of the forward pass, a count."""
        return self.matmul_flops + self.pair_flops + self.elementwise_flops

    def __add__(self, other: "Cost") -> "Cost":
        # Written out, since plans add millions of them.
        return Cost(
            self.params + other.params,
            self.matmul_flops + other.matmul_flops,
            self.pair_flops + other.pair_flops,
            self.elementwise_flops + other.elementwise_flops,
            self.saved_bytes + other.saved_bytes,
            self.cache_bytes + other.cache_bytes,
            self.shared_params + other.shared_params,
            self.table_params + other.table_params,
        )


def visible_pairs(tokens: int, window: int | None) -> int:
    """Counts the (query, key) pairs of causal attention over a window that includes the query.

    Example:
        >>> visible_pairs(8, 4), visible_pairs(4, None)
        (26, 10)
    """
    width = tokens if window is None else min(window, tokens)
    return width * (width + 1) // 2 + (tokens - width) * width


def chunk_pairs(tokens: int, size: int) -> int:
    """Counts the (query, key) pairs of causal attention inside chunks that begin at multiples of a size.

    Example:
        >>> chunk_pairs(8, 4), chunk_pairs(3, 4)
        (20, 6)
    """
    whole, rest = divmod(tokens, size)
    return whole * visible_pairs(size, None) + visible_pairs(rest, None)


STATISTICS_BYTES = 4
"""Of a statistic in a model of half precision; a statistic is never narrower than the model."""


@dataclass(frozen=True)
class ElementCount:
    """Numbers per token: those in the dtype of the model, and statistics, which are in float32 at least.

    Example:
        >>> (ElementCount(8) + ElementCount(8, statistics=1)).bytes(element_bytes=2)
        36
    """

    model: int = 0
    statistics: int = 0

    def bytes(self, element_bytes: int) -> int:
        """Bytes per token when a number of the model has `element_bytes`."""
        return self.model * element_bytes + self.statistics * max(STATISTICS_BYTES, element_bytes)

    @property
    def count(self) -> int:
        """Numbers of either sort."""
        return self.model + self.statistics

    def __add__(self, other: "ElementCount") -> "ElementCount":
        return ElementCount(self.model + other.model, self.statistics + other.statistics)

    def __sub__(self, other: "ElementCount") -> "ElementCount":
        return ElementCount(self.model - other.model, self.statistics - other.statistics)

    def __mul__(self, times: int) -> "ElementCount":
        return ElementCount(self.model * times, self.statistics * times)
