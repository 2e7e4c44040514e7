"""A measured ratio beside the bound that it is to keep."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.measure import Timing


@dataclass(frozen=True)
class Bound:
    """One line of the table of bounds.

    Attributes:
        what: was measured, with its shape.
        measured: the ratio or count.
        limit: the bound.
        side: whether the measured value has to be `at most` or `at least` the limit.
        unit: of both numbers.
        spread: the lowest and the highest ratio of a round.
        ours: the absolute value behind the ratio.
        other: what it is compared with, and its absolute value.
    """

    what: str
    measured: float
    limit: float
    side: Literal["at most", "at least"] = "at most"
    unit: str = "x"
    spread: tuple[float, float] | None = None
    ours: str = ""
    other: str = ""

    @property
    def kept(self) -> bool:
        """Whether the bound is kept."""
        return self.measured <= self.limit if self.side == "at most" else self.measured >= self.limit


def over_first(what: str, timings: Sequence[Timing], limit: float, name: str = "") -> Bound:
    """The bound on our time over that of the first candidate; ours is the named one, or the last."""
    ours = next((timing for timing in timings if timing.name == name), timings[-1])
    spread, other = (ours.lowest, ours.highest), f"{timings[0].name} {_ms(ours.first_seconds)}"
    return Bound(what, ours.ratio, limit, spread=spread, ours=_ms(ours.seconds), other=other)


def fastest_over_ours(what: str, ours: Timing, others: Sequence[Timing], limit: float) -> list[Bound]:
    """The bound on the time of the fastest of others over ours, which is the first candidate; nothing without others."""
    if not others:
        return []
    best = min(others, key=lambda timing: timing.ratio)
    spread = best.lowest, best.highest
    other = f"{best.name} {_ms(best.seconds)}"
    return [Bound(what, best.ratio, limit, "at least", spread=spread, ours=_ms(best.first_seconds), other=other)]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds * 1e3:.0f} ms"


def bounds_table(bounds: Sequence[Bound]) -> str:
    """Lays bounds out as a Markdown table."""
    lines = ["| what | ours | best other | measured (min..max) | bound | kept |", "|---|---|---|---|---|---|"]
    for b in bounds:
        spread = "" if b.spread is None else f" ({b.spread[0]:.2f}..{b.spread[1]:.2f})"
        kept = "yes" if b.kept else "**no**"
        measured = f"{b.measured:.2f}{spread} {b.unit}"
        lines.append(
            f"| {b.what} | {b.ours or '-'} | {b.other or '-'} | {measured} | {b.side} {b.limit:.3g} {b.unit} | {kept} |"
        )
    return "\n".join(lines)
