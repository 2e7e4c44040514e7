"""Numbers per token, in the precision of the model and in that of statistics."""

from dataclasses import dataclass

STATISTICS_BYTES = 4
"""Of a statistic in a model of half precision; a statistic is never narrower than the model."""


@dataclass(frozen=True)
class Numbers:
    """Numbers per token: those in the dtype of the model, and statistics, which are in float32 at least.

    Example:
        >>> (Numbers(8) + Numbers(8, statistics=1)).bytes(element_bytes=2)
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

    def __add__(self, other: "Numbers") -> "Numbers":
        return Numbers(self.model + other.model, self.statistics + other.statistics)

    def __sub__(self, other: "Numbers") -> "Numbers":
        return Numbers(self.model - other.model, self.statistics - other.statistics)

    def __mul__(self, times: int) -> "Numbers":
        return Numbers(self.model * times, self.statistics * times)
