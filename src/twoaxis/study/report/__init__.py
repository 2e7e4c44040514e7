"""Writes the report of a study folder: `report.json`, and the page, figures and tables made from it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from twoaxis.core.errors import StudyError
from twoaxis.core.files import replacing
from twoaxis.study.planning.study_plan import StudyPlan
from twoaxis.study.report.analysis import analyse
from twoaxis.study.report.text_tables import csv_tables
from twoaxis.study.report.validity import with_gate
from twoaxis.study.report_data import ReportData, read_report
from twoaxis.study.running.baselines import Baselines, measure_baselines
from twoaxis.study.running.study_folder import RunKey, RunRecord, StudyFolder, run_keys, write_json


class Report(NamedTuple):
    """A written report.

    Attributes:
        data: the content of `report.json`.
        html: the page.
        json: the numbers.
        files: the page, its figures and tables, and the schema of the numbers.
    """

    data: ReportData
    html: Path
    json: Path
    files: tuple[Path, ...]


def read_study_folder(folder: Path | str) -> ReportData:
    """Analyses a study folder, complete or not.

    Measures losses of count models and stores them in the folder, unless they are there already.

    Raises:
        StudyError: the folder holds no study, or a damaged one.
        DataError: the folder cannot be written.
    """
    study_folder = StudyFolder(folder)
    study, plan = study_folder.study, study_folder.plan
    records = {key: study_folder.record(key) for key in run_keys(plan)}
    audits = {arm.name: audit for arm in plan.arms if (audit := study_folder.audit(RunKey(arm.name, arm.seeds[0]))) is not None}
    return analyse(
        study,
        # Matching was by the timing of the plan, comparisons are by that of the machine to which the study has moved.
        plan.replace(timing=study_folder.timing_before),
        records,
        _baselines(study_folder, plan, records),
        timing_after=study_folder.timing_after,
        learning_rates=study_folder.learning_rates,
        audits=audits,
        command=study_folder.command,
    )


def _baselines(folder: StudyFolder, plan: StudyPlan, records: Mapping[RunKey, RunRecord]) -> Baselines:
    control = plan.control
    kept = folder.baselines
    if kept is not None and set(control.seeds) <= set(kept.by_seed):
        return kept
    finished = {seed: record for seed in control.seeds if (record := records[RunKey(control.name, seed)]).status == "finished"}
    if not finished:
        # Nothing to compare with yet; do not wait for a tokenizer.
        return Baselines()
    recipes = {seed: control.train_config(seed) for seed in control.seeds}
    measured = measure_baselines(recipes, {seed: record.data for seed, record in finished.items()})
    if measured.by_seed:
        folder.keep_baselines(measured)
    return measured


def write_report(folder: Path | str) -> Report:
    """Writes the report of a study folder into it, each file whole or not at all.

    A folder with only a `report.json` gets its page, figures and tables from that. An old report without a validity gate gets
    one if its corpus is available.

    Raises:
        StudyError: the folder holds neither, or a damaged study.
        DataError: the folder cannot be written.
    """
    path = Path(folder)
    if (path / "study.json").exists():
        data = read_study_folder(path)
        write_json(path / "report.json", data.to_data())
    elif (path / "report.json").exists():
        data = read_report(path)
        if data.gate is None and (gated := with_gate(data)).gate is not None and gated.gate.passed is not None:
            data = gated
            write_json(path / "report.json", data.to_data())
    else:
        raise StudyError(
            f"{path}: holds no study and no report; must be a folder that `twoaxis study` has made; check the path"
        )
    files = write_report_files(data, path)
    return Report(data, files[0], path / "report.json", files)


DIALECT = "https://json-schema.org/draft/2020-12/schema"


def write_report_files(data: ReportData, folder: Path | str) -> tuple[Path, ...]:
    """Writes the page, schema, figures (SVG, PNG) and tables (CSV) of a report, each file whole or not at all.

    Figures and tables of an earlier report that this one lacks are removed.

    Raises:
        DataError: the folder cannot be written.
    """
    # Only figures need the plotting library, and the page imports tables from this package.
    from twoaxis.study.figures import NAMES, study_figures
    from twoaxis.study.page import render_page

    figures, tables = study_figures(data), csv_tables(data)
    schema = {"$schema": DIALECT, **ReportData.model_json_schema()}
    contents = {
        "report.html": render_page(data, figures).encode(),
        "report.schema.json": json.dumps(schema, indent=1).encode(),
        **{f"figures/{figure.name}.svg": figure.svg().encode() for figure in figures},
        **{f"figures/{figure.name}.png": figure.png() for figure in figures},
        **{f"tables/{name}.csv": text.encode() for name, text in tables.items() if text},
    }
    for name, content in contents.items():
        with replacing(Path(folder) / name) as file:
            file.write(content)
    drawn = (f"figures/{name}.{kind}" for name in NAMES for kind in ("svg", "png"))
    possible = (*drawn, *(f"tables/{name}.csv" for name in tables))
    for path in (path for pattern in possible for path in Path(folder).glob(pattern)):
        if path.relative_to(folder).as_posix() not in contents:
            path.unlink(missing_ok=True)
    return tuple(Path(folder) / name for name in contents)
