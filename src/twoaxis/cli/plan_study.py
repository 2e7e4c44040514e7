"""The plan of a study: hours, tokens, FLOPs and memory of every arm, before anything is spent."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from twoaxis.cli.output import print_json
from twoaxis.display.tables import print_item, print_table

if TYPE_CHECKING:
    from twoaxis.study.planning.plan import StudyPlan


def plan_of_study(study_file: Path, as_json: bool, overrides: Sequence[str] = (), measure: bool = True) -> int:
    """Plans a study and prints it.

    Args:
        study_file: in TOML or JSON.
        as_json: whether to print JSON.
        overrides: changes to it.
        measure: whether a few steps of every arm are measured.
    """
    import tempfile

    from twoaxis.study import read_study
    from twoaxis.study.planning import plan_study
    from twoaxis.study.running import measured_plan
    from twoaxis.study.running.progress import console_study_progress

    config = read_study(study_file, overrides)
    if not measure:
        return print_plan(plan_study(config), as_json)
    with tempfile.TemporaryDirectory() as folder:
        return print_plan(measured_plan(config, Path(folder), console_study_progress()), as_json)


def print_plan(planned: "StudyPlan", as_json: bool) -> int:
    """Prints the arms of a plan and what was left out."""
    from twoaxis.display import numbers as words
    from twoaxis.study.report.tables import PLAN_COLUMNS, plan_rows, plan_title

    if as_json:
        print_json({"title": plan_title(planned), **planned.to_data()})
        return 0
    print_table(plan_title(planned), PLAN_COLUMNS, plan_rows(planned), numbers=PLAN_COLUMNS[2:-1])
    for arm in planned.arms:
        if arm.why and arm.role in ("treatment", "companion"):
            print_item(f"{arm.name}: {arm.why}", "")
    for note in planned.notes:
        print_item(f"left out: {note}", "")
    if planned.timing is None:
        measured = "are measured by `twoaxis plan`, and by `twoaxis study` before its first run"
        print_item(f"hours and memory ({words.MISSING}) {measured}", "")
    return 0
