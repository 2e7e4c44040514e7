"""Tables and paragraphs for terminals, wrapped to the width of a line without breaking numbers or words."""

import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence

GAP = "  "
"""Between two columns of a table."""

READABLE = 18
"""Smallest width of a column of text, before remaining columns move to another table."""

UNIT = re.compile(r"(?<=\d) (?=(?:[A-Za-zµ]{1,3}|%)(?!\w))")
"""The space between a number and its unit."""


def line_width() -> int:
    """Characters of a line: COLUMNS, else the width of the terminal, else 80."""
    return shutil.get_terminal_size((80, 24)).columns


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    numbers: Sequence[str] = (),
    width: int | None = None,
    whole: Sequence[str] = (),
) -> None:
    """Prints a table within the width of a line, without breaking numbers or words.

    Columns that do not fit follow as another table, which repeats the columns that name the rows.

    Args:
        title: above it, or empty.
        columns: names.
        rows: cells.
        numbers: columns that are right-aligned and not wrapped.
        width: in characters; `line_width` by default.
        whole: other columns that are not wrapped.
    """
    width = width or line_width()
    table = [_Column(name, [str(row[at]) for row in rows], name in numbers, name in whole) for at, name in enumerate(columns)]
    if title:
        print_item(title, "", width)
    for part in _parts(table, width):
        widths = _widths(part, width)
        for line in (None, *range(len(rows))):
            _print_row(part, widths, line)
        if part[-1] is not table[-1]:
            print()


class _Column:
    """A column of a table; row None is its name."""

    def __init__(self, name: str, cells: Sequence[str], number: bool, whole: bool) -> None:
        # No break between a number and its unit.
        self.name, self.number = name, number
        cells = [" ".join(cell.split("\n")) for cell in cells]
        self._cells = [cell if number or whole else UNIT.sub("\N{NO-BREAK SPACE}", cell) for cell in cells]
        words = max(len(word) for text in (name, *([] if number or whole else self._cells)) for word in text.split(" "))
        widest = max(map(len, self._cells), default=0)
        self.most = max(len(name), widest)
        self.least = max(words, widest) if number or whole else max(words, min(self.most, READABLE))
        self._whole = number or whole

    def lines(self, row: int | None, width: int) -> list[str]:
        """Wraps a cell, or the name, to this width."""
        text = self.name if row is None else self._cells[row]
        if row is not None and self._whole:
            return [text]
        found = textwrap.wrap(text, max(width, 1), break_long_words=False, break_on_hyphens=False) or [""]
        return [line.replace("\N{NO-BREAK SPACE}", " ") for line in found]


def _parts(table: Sequence[_Column], width: int) -> Iterator[list[_Column]]:
    """The columns of each printed table."""
    names = next((at for at, column in enumerate(table) if column.number), 1) or 1
    # Text columns before the numbers name the rows, if they leave room.
    if _least(table[:names]) > width // 2:
        names = 1
    named, part = list(table[:names]), list(table[:names])
    for column in table[names:]:
        if len(part) > names and _least([*part, column]) > width:
            yield part
            part = list(named)
        part.append(column)
    yield part


def _least(part: Sequence[_Column]) -> int:
    return sum(column.least for column in part) + len(GAP) * (len(part) - 1)


def _widths(part: Sequence[_Column], width: int) -> list[int]:
    """The widths of all columns; spare room goes to the narrowest column that needs more."""
    found, spare = [column.least for column in part], width - _least(part)
    while spare > 0 and (wanting := [at for at, column in enumerate(part) if found[at] < column.most]):
        found[min(wanting, key=found.__getitem__)] += 1
        spare -= 1
    return found


def _print_row(part: Sequence[_Column], widths: Sequence[int], row: int | None) -> None:
    cells = [column.lines(row, width) for column, width in zip(part, widths, strict=True)]
    for at in range(max(map(len, cells))):
        texts = [cell[at] if at < len(cell) else "" for cell in cells]
        aligned = [
            text.rjust(width) if column.number else text.ljust(width)
            for column, text, width in zip(part, texts, widths, strict=True)
        ]
        print(GAP.join(aligned).rstrip())


def print_item(text: str, indent: str = "* ", width: int | None = None) -> None:
    """Prints a paragraph with a hanging indent, as wide as a table."""
    # Paths and names with hyphens are not broken, so that they can be copied.
    print(
        textwrap.fill(
            text,
            width or line_width(),
            initial_indent=indent,
            subsequent_indent=" " * len(indent),
            break_on_hyphens=False,
            break_long_words=False,
        )
    )
