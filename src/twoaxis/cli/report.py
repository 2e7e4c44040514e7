"""`twoaxis report FOLDER`: the table and the pages of a study that has run, or is still running."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from twoaxis.cli.output import Json, print_json, print_table

if TYPE_CHECKING:
    from twoaxis.study.report import Report


def report(
    folder: Annotated[Path, typer.Argument(help="The folder of a study.")],
    as_json: Json = False,
) -> int:
    """Write report.html and report.json of a study folder again, and print its table.

    Example: twoaxis report runs/first
    """
    from twoaxis.study.report import write_report

    return print_report(write_report(folder), as_json)


def print_report(written: "Report", as_json: bool) -> int:
    """Prints the outcome of a study; 1 while runs are missing, since there is no verdict without them."""
    from twoaxis.study.table import (
        ACCURACY_COLUMNS,
        CONTRAST_COLUMNS,
        RESULT_COLUMNS,
        accuracy_rows,
        contrast_rows,
        result_rows,
    )

    data = written.data
    if as_json:
        print_json({**data.to_data(), "report": str(written.html)})
        return 0 if data.complete else 1
    words_in = ("verdict", "at equal FLOPs", "at equal seconds")
    print_table(data.question, RESULT_COLUMNS, result_rows(data), [c for c in RESULT_COLUMNS[1:] if c not in words_in])
    if contrasts := contrast_rows(data):
        print_table("against companions", CONTRAST_COLUMNS, contrasts, CONTRAST_COLUMNS[3:5])
    if accuracies := accuracy_rows(data):
        print_table("accuracy on the answers, after the last step", ACCURACY_COLUMNS, accuracies, ACCURACY_COLUMNS[1:])
    print(f"\n{data.answer}\n")
    for arm in data.arms.values():
        if arm.role == "treatment":
            print(arm.sentence)
    print(f"\nreport: {written.html}")
    return 0 if data.complete else 1
