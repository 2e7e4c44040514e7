"""The report of a study folder: `report.json` with every number, and all that is made from it."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from twoaxis.core.errors import StudyError
from twoaxis.study.analysis import analyse
from twoaxis.study.baselines import Baselines, measure_baselines
from twoaxis.study.folder import Place, RunRecord, StudyFolder, places, write_json
from twoaxis.study.plan import StudyPlan
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

    Losses of count models are measured, and kept in the folder, unless they are there already.

    Raises:
        StudyError: the folder holds no study, or a damaged one.
        DataError: the folder cannot be written.
    """
    place_in = StudyFolder(folder)
    study, plan = place_in.study, place_in.plan
    records = {place: place_in.record(place) for place in places(plan)}
    audits = {arm.name: audit for arm in plan.arms if (audit := place_in.audit(Place(arm.name, arm.seeds[0]))) is not None}
    return analyse(
        study,
        plan,
        records,
        _baselines(place_in, plan, records),
        timing_after=place_in.timing_after,
        learning_rates=place_in.learning_rates,
        audits=audits,
        command=place_in.command,
    )


def _baselines(folder: StudyFolder, plan: StudyPlan, records: Mapping[Place, RunRecord]) -> Baselines:
    control = plan.control
    kept = folder.baselines
    if kept is not None and set(control.seeds) <= set(kept.by_seed):
        return kept
    finished = {seed: record for seed in control.seeds if (record := records[Place(control.name, seed)]).status == "finished"}
    if not finished:
        # Nothing to compare with yet; a report must not wait for a tokenizer.
        return Baselines()
    recipes = {seed: control.train_config(seed) for seed in control.seeds}
    measured = measure_baselines(recipes, {seed: record.data for seed, record in finished.items()})
    if measured.by_seed:
        folder.keep_baselines(measured)
    return measured


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
