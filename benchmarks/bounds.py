"""A measured ratio beside the bound that it is to keep."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Bound:
    """One line of the final table.

    Attributes:
        what: what was measured, with its shape.
        measured: the ratio or count.
        limit: the bound.
        side: whether the measured value has to be `at most` or `at least` the limit.
        unit: of both numbers.
    """

    what: str
    measured: float
    limit: float
    side: Literal["at most", "at least"] = "at most"
    unit: str = "x"

    @property
    def kept(self) -> bool:
        """Whether the bound is kept."""
        return self.measured <= self.limit if self.side == "at most" else self.measured >= self.limit


def bounds_table(bounds: list[Bound]) -> str:
    """Lays bounds out as a Markdown table."""
    lines = ["| what | measured | bound | kept |", "|---|---|---|---|"]
    for b in bounds:
        kept = "yes" if b.kept else "**no**"
        lines.append(f"| {b.what} | {b.measured:.2f} {b.unit} | {b.side} {b.limit:g} {b.unit} | {kept} |")
    return "\n".join(lines)
