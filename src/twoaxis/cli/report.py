"""`twoaxis report FOLDER`: the table and the page of a finished or running study."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from twoaxis.cli.output import Json, print_json
from twoaxis.display.tables import print_table

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
    from twoaxis.study.report.text_tables import (
        ACCURACY_COLUMNS,
        CONTRAST_COLUMNS,
        COST_COLUMNS,
        RATE_COLUMNS,
        RESULT_COLUMNS,
        accuracy_rows,
        contrast_rows,
        cost_rows,
        rate_rows,
        result_rows,
        tuning_table,
    )

    data = written.data
    if as_json:
        print_json({**data.to_data(), "report": str(written.html)})
        return 0 if data.complete else 1
    print_table(data.question, RESULT_COLUMNS, result_rows(data), RESULT_COLUMNS[1:-1])
    print_table("at equal cost, and what each arm costs", COST_COLUMNS, cost_rows(data), COST_COLUMNS[3:])
    if contrasts := contrast_rows(data):
        print_table("arm against arm", CONTRAST_COLUMNS, contrasts, CONTRAST_COLUMNS[3:6])
    if accuracies := accuracy_rows(data):
        print_table("accuracy on the answers, after the last step", ACCURACY_COLUMNS, accuracies, ACCURACY_COLUMNS[1:])
    columns, rows = tuning_table(data)
    if rows:
        print_table("validation loss of one trial for each learning rate", columns, rows, columns[1:-1])
    if rates := rate_rows(data):
        print_table("optimiser groups, where an arm differs from the control", RATE_COLUMNS, rates, RATE_COLUMNS[2:])
    print(f"\n{data.answer}")
    if data.gate is not None:
        print("\n".join(filter(None, (data.gate.sentence, *data.gate.reasons, data.gate.change))))
    print()
    for sentence in (*data.findings, *(arm.sentence for arm in data.arms.values() if arm.role == "treatment")):
        print(sentence)
    if data.timing is not None and data.timing.sentence:
        print(f"Timing: {data.timing.sentence}.")
    print(f"\nreport: {written.html}")
    return 0 if data.complete else 1
