"""`python -m benchmarks`: ratios measured in one run, and the bounds they are to keep."""

import argparse
import contextlib
import io
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from benchmarks import backbone, decode, depth, depth_read, sequence, short_swa
from benchmarks.bounds import Bound, bounds_table
from benchmarks.conformance import all_mixers_are_right
from benchmarks.measure import header_lines

SECTIONS = {
    "depth_read": depth_read.run,
    "short_swa": short_swa.run,
    "depth": depth.run,
    "sequence": sequence.run,
    "backbone": backbone.run,
    "decode": decode.run,
}


def main() -> int:
    """Runs the sections and prints the table of bounds; 1 when a bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sections", nargs="*", help=f"any of {', '.join(SECTIONS)}; all by default")
    parser.add_argument("--rounds", type=int, default=4, help="samples of each candidate")
    parser.add_argument("--save", type=Path, help="also write everything to this Markdown file, the bounds first")
    arguments = parser.parse_args()
    unknown = [section for section in arguments.sections if section not in SECTIONS]
    if unknown:
        parser.error(f"unknown section {unknown[0]!r}: must be one of {', '.join(SECTIONS)}")
    begin, minutes = time.perf_counter(), dict[str, float]()
    if not all_mixers_are_right():
        return 1
    minutes["conformance"] = (time.perf_counter() - begin) / 60
    text, bounds = _Copy(), list[Bound]()
    with contextlib.redirect_stdout(text):
        for section in arguments.sections or SECTIONS:
            start = time.perf_counter()
            bounds += SECTIONS[section](arguments.rounds)
            minutes[section] = (time.perf_counter() - start) / 60
            print(f"{section} took {minutes[section]:.1f} minutes", file=sys.stderr)
    head = _head(bounds, minutes)
    print(head)
    if arguments.save is not None:
        arguments.save.parent.mkdir(parents=True, exist_ok=True)
        arguments.save.write_text(f"{head}\n{text.getvalue().rstrip()}\n", encoding="utf-8")
    return 0 if all(bound.kept for bound in bounds) else 1


def _head(bounds: list[Bound], minutes: dict[str, float]) -> str:
    """The date, the machine, and the bounds."""
    took = ", ".join(f"{section} {spent:.1f}" for section, spent in minutes.items())
    made = f"Made {datetime.now(UTC):%Y-%m-%d %H:%M} UTC in one run of {sum(minutes.values()):.0f} minutes ({took})."
    return f"# Benchmarks\n\n{made}\n\n{header_lines()}\n### Bounds\n\n{bounds_table(bounds)}\n"


class _Copy(io.StringIO):
    """Keeps what is printed and passes it on at once."""

    def __init__(self) -> None:
        super().__init__()
        self._to = sys.stdout

    def write(self, text: str) -> int:
        self._to.write(text)
        self._to.flush()
        return super().write(text)


if __name__ == "__main__":
    sys.exit(main())
