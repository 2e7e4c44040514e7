"""`twoaxis study STUDY`: arms against a control, in pairs, with intervals."""

from pathlib import Path
from typing import Annotated

import typer

from twoaxis.cli.output import Json, print_json, print_table
from twoaxis.cli.report import print_report


def study(
    study_file: Annotated[Path, typer.Argument(metavar="STUDY", help="A study in TOML or JSON.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Changes to the study as key=value, such as replicates=3 or budget.steps=400.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The folder of the study; by default runs/ and the file's name.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would run, and stop.")] = False,
    as_json: Json = False,
) -> int:
    """Run a study, print its table, and write its report.

    A study has a question, arms, a control, replicates and a budget fixed in advance; every run is a process of its own.
    Stop it at any moment: the same command keeps what is finished and resumes the rest. A report is written whatever came
    out; "undecided" is a verdict, and says what would decide.

    Example: twoaxis study studies/first.toml replicates=3 --out runs/first
    """
    from twoaxis.study import read_study
    from twoaxis.study.plan import plan_study
    from twoaxis.study.progress import console_study_progress
    from twoaxis.study.report import write_report
    from twoaxis.study.runner import run_study
    from twoaxis.study.table import PLAN_COLUMNS, plan_rows, plan_title

    config = read_study(study_file, overrides or [])
    if dry_run:
        plan = plan_study(config)
        if as_json:
            print_json({"title": plan_title(plan), "arms": [dict(zip(PLAN_COLUMNS, r, strict=True)) for r in plan_rows(plan)]})
        else:
            print_table(plan_title(plan), PLAN_COLUMNS, plan_rows(plan), numbers=PLAN_COLUMNS[1:])
        return 0
    folder = out or Path("runs") / study_file.stem
    run_study(config, folder, progress=console_study_progress())
    return print_report(write_report(folder), as_json)
