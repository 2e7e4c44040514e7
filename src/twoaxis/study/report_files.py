"""The files of a report beside its data: the page, the schema of the data, figures and tables."""

import json
from pathlib import Path
from typing import NamedTuple

from twoaxis.core.atomic import replacing
from twoaxis.study.csv_tables import tables
from twoaxis.study.figures import study_figures
from twoaxis.study.page import render_page
from twoaxis.study.report_data import ReportData

DIALECT = "https://json-schema.org/draft/2020-12/schema"


class ReportFiles(NamedTuple):
    """The files of a report that have been written.

    Attributes:
        html: the page.
        schema: that `report.json` keeps to.
        figures: as SVG and as PNG.
        tables: as CSV.
    """

    html: Path
    schema: Path
    figures: tuple[Path, ...]
    tables: tuple[Path, ...]


def write_report_files(data: ReportData, folder: Path | str) -> ReportFiles:
    """Writes everything that is made of `report.json` beside it, each file whole or not at all.

    Raises:
        DataError: the folder cannot be written.
    """
    path = Path(folder)
    figures = study_figures(data)
    drawn = []
    for figure in figures:
        drawn.append(_write(path / "figures" / f"{figure.name}.svg", figure.svg().encode()))
        drawn.append(_write(path / "figures" / f"{figure.name}.png", figure.png()))
    made = [_write(path / "tables" / f"{name}.csv", text.encode()) for name, text in tables(data).items()]
    schema = {"$schema": DIALECT, **ReportData.model_json_schema()}
    return ReportFiles(
        html=_write(path / "report.html", render_page(data, figures).encode()),
        schema=_write(path / "report.schema.json", json.dumps(schema, indent=1).encode()),
        figures=tuple(drawn),
        tables=tuple(made),
    )


def _write(path: Path, content: bytes) -> Path:
    with replacing(path) as file:
        file.write(content)
    return path
