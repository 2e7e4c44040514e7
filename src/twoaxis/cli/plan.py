"""`twoaxis plan STUDY`: hours, tokens, FLOPs and memory of every arm, before anything is spent."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from twoaxis.cli.output import Json, print_json, print_table

if TYPE_CHECKING:
    from twoaxis.study.plan import StudyPlan


def plan(
    study_file: Annotated[Path, typer.Argument(metavar="STUDY", help="A study in TOML or JSON.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Changes to the study as key=value.")] = None,
    measure: Annotated[
        bool, typer.Option("--measure/--count", help="Measure a few steps of every arm here, or count only.")
    ] = True,
    as_json: Json = False,
) -> int:
    """Plan a study: what every arm costs, what was changed so that arms match, and which companions stand beside them.

    A few steps of every arm are measured, in turns, for the hours and the memory; that takes a minute or so for a small
    study. `--count` leaves both out and takes a moment.

    Example: twoaxis plan studies/shortcut.toml replicates=5
    """
    import tempfile

    from twoaxis.study import read_study
    from twoaxis.study.planner import plan_study
    from twoaxis.study.progress import console_study_progress
    from twoaxis.study.runner import measured_plan

    config = read_study(study_file, overrides or [])
    if not measure:
        return print_plan(plan_study(config), as_json)
    with tempfile.TemporaryDirectory() as folder:
        return print_plan(measured_plan(config, Path(folder), console_study_progress()), as_json)


def print_plan(planned: "StudyPlan", as_json: bool) -> int:
    """Prints the arms of a plan and what was left out."""
    from twoaxis.study import words
    from twoaxis.study.table import PLAN_COLUMNS, plan_rows, plan_title

    if as_json:
        print_json({"title": plan_title(planned), **planned.to_data()})
        return 0
    print_table(plan_title(planned), PLAN_COLUMNS, plan_rows(planned), numbers=PLAN_COLUMNS[2:-1])
    for arm in planned.arms:
        if arm.why and arm.role in ("treatment", "companion"):
            print(f"{arm.name}: {arm.why}")
    for note in planned.notes:
        print(f"left out: {note}")
    if planned.timing is None:
        print(f"hours and memory ({words.MISSING}) are measured by `twoaxis plan`, and by `twoaxis study` before its first run")
    return 0
