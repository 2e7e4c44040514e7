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
    from twoaxis.study.table import ACCURACY_COLUMNS, RESULT_COLUMNS, accuracy_rows, result_rows
    from twoaxis.study.verdicts import verdict_sentence

    analysis = written.analysis
    if as_json:
        print_json({**written.data, "report": str(written.html)})
    else:
        numbers = [column for column in RESULT_COLUMNS[1:] if column != "verdict"]
        print_table(analysis.study.question, RESULT_COLUMNS, result_rows(analysis), numbers)
        if accuracies := accuracy_rows(analysis):
            print_table("accuracy on the answers, after the last step", ACCURACY_COLUMNS, accuracies, ACCURACY_COLUMNS[1:])
        print()
        for arm in analysis.arms:
            if arm.name != analysis.study.control:
                print(verdict_sentence(analysis, arm))
        print(f"\nreport: {written.html}")
    return 0 if analysis.complete else 1
