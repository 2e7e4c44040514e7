"""One published number beside the planner's, and the table of one paper."""

from dataclasses import dataclass
from typing import Literal

FAR = 0.15
"""Relative difference from which a prediction needs an explanation."""

Unit = Literal["overhead", "count", "percent", "widths", "GB"]
"""`overhead`: seconds, bytes or FLOPs as a multiple of what the same paper's plain model takes; `percent`: a share; `widths`:
numbers per token and sublayer, over d_model."""


@dataclass(frozen=True)
class Row:
    """A claim.

    Attributes:
        claim: what is claimed.
        published: the value in the paper; of an overhead the multiple, 1.12 for 12 % more.
        predicted: the planner's.
        unit: of both.
        bound: whether the paper says no more than that it is below.
        digits: after the point, that the paper gives; counts are compared with so many.
        why: what explains a difference of more than `FAR`, or why the two are equal.
    """

    claim: str
    published: float
    predicted: float
    unit: Unit = "overhead"
    bound: bool = False
    digits: int = 1
    why: str = ""

    @property
    def ratio(self) -> float:
        """Predicted over published, of overheads themselves: 10 % against 5 % is 2."""
        base = 1 if self.unit == "overhead" else 0
        return (self.predicted - base) / (self.published - base)

    @property
    def total_ratio(self) -> float:
        """Predicted over published, of seconds, bytes or counts in all."""
        return self.predicted / self.published

    @property
    def holds(self) -> bool:
        """Whether the planner confirms it: below a bound, the same number when rounded alike, or else not far."""
        if self.bound:
            return self.predicted < self.published
        if self.unit in ("count", "percent"):
            return round(self.predicted, self.digits) == self.published
        return abs(self.ratio - 1) <= FAR

    @property
    def drawn(self) -> bool:
        """Whether it is an overhead with a number, over the same model without the method."""
        return self.unit == "overhead" and not self.bound and "against" not in self.claim

    def cells(self) -> tuple[str, ...]:
        """The row as text, in the order of `COLUMNS`."""
        less = "< " if self.bound else ""
        ratios = ("", "") if self.bound else (f"{self.ratio:.2f}", f"{self.total_ratio:.2f}" if self.unit == "overhead" else "")
        return (self.claim, less + self._text(self.published), self._text(self.predicted), *ratios, self.why)

    def _text(self, value: float) -> str:
        if self.unit == "overhead":
            return f"{100 * (value - 1):+.{self.digits}f} %"
        if self.unit == "percent":
            return f"{value:.{self.digits}f} %"
        if self.unit == "count":
            return f"{value:,.{self.digits}f}"
        return f"{value:.3g} {'GB' if self.unit == 'GB' else 'd'}"


COLUMNS = ("claim", "published", "predicted", "ratio", "ratio of totals", "remark")


@dataclass(frozen=True)
class Published:
    """What one paper publishes of costs, beside the planner's numbers.

    Attributes:
        method: of the paper.
        source: paper and tables.
        setting: what ran on what, and what of it is assumed here because it is not published.
        rows: the claims.
        remarks: what explains differences, with the numbers behind it.
        contradicted: counts of the paper that the ledger contradicts.
    """

    method: str
    source: str
    setting: str
    rows: tuple[Row, ...]
    remarks: tuple[str, ...] = ()
    contradicted: tuple[str, ...] = ()
