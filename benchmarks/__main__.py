"""`python -m benchmarks`: ratios measured in one run, and the bounds they are to keep."""

import argparse
import contextlib
import io
import sys
from pathlib import Path

from benchmarks import backbone, decode, depth, depth_read, graphs, sequence, short_swa
from benchmarks.bounds import Bound, bounds_table
from benchmarks.conformance import all_mixers_are_right
from benchmarks.measure import header_lines

SECTIONS = {
    "graphs": graphs.run,
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
    parser.add_argument("--rounds", type=int, default=7, help="samples of each candidate")
    parser.add_argument("--save", type=Path, help="also write everything to this Markdown file")
    arguments = parser.parse_args()
    unknown = [section for section in arguments.sections if section not in SECTIONS]
    if unknown:
        parser.error(f"unknown section {unknown[0]!r}: must be one of {', '.join(SECTIONS)}")
    if not all_mixers_are_right():
        return 1
    text = _Copy()
    with contextlib.redirect_stdout(text):
        print("## Benchmarks\n")
        print(header_lines())
        bounds: list[Bound] = []
        for section in arguments.sections or SECTIONS:
            bounds += SECTIONS[section](arguments.rounds)
        print(f"### Bounds\n\n{bounds_table(bounds)}")
    if arguments.save is not None:
        arguments.save.parent.mkdir(parents=True, exist_ok=True)
        arguments.save.write_text(text.getvalue(), encoding="utf-8")
    return 0 if all(bound.kept for bound in bounds) else 1


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
