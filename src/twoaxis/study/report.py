"""The report of a study folder: `report.json` with every number, and all that is made from it."""

from pathlib import Path
from typing import NamedTuple

from twoaxis.core.errors import StudyError
from twoaxis.study.analysis import analyse
from twoaxis.study.folder import Place, StudyFolder, places, write_json
from twoaxis.study.report_data import ReportData, read_report


class Report(NamedTuple):
    """A report that has been written.

    Attributes:
        data: what it says, as in `report.json`.
        html: the page.
        json: the numbers.
        files: the page, its figures and tables, and the schema of the numbers.
    """

    data: ReportData
    html: Path
    json: Path
    files: tuple[Path, ...]


def read_study_folder(folder: Path | str) -> ReportData:
    """Analyses what a study folder holds, complete or not.

    Raises:
        StudyError: the folder holds no study, or a damaged one.
    """
    place_in = StudyFolder(folder)
    study, plan = place_in.study, place_in.plan
    records = {place: place_in.record(place) for place in places(plan)}
    audits = {arm.name: audit for arm in plan.arms if (audit := place_in.audit(Place(arm.name, arm.seeds[0]))) is not None}
    return analyse(study, plan, records, place_in.learning_rates, audits, place_in.command)


def write_report(folder: Path | str) -> Report:
    """Writes the report of a study folder into it, each file whole or not at all.

    A folder that holds a `report.json` and no study gets its page, figures and tables from that.

    Raises:
        StudyError: the folder holds neither, or a damaged study.
        DataError: the folder cannot be written.
    """
    from twoaxis.study.report_files import write_report_files

    path = Path(folder)
    if (path / "study.json").exists():
        data = read_study_folder(path)
        write_json(path / "report.json", data.to_data())
    elif (path / "report.json").exists():
        data = read_report(path)
    else:
        raise StudyError(
            f"{path}: holds no study and no report; must be a folder that `twoaxis study` has made; check the path"
        )
    made = write_report_files(data, path)
    return Report(data, made.html, path / "report.json", (made.html, made.schema, *made.figures, *made.tables))
