"""The figures of a report, rendered to SVG and PNG without a browser or the network."""

import re
from dataclasses import replace

from twoaxis.display.figures import Figure
from twoaxis.study.figures.audits import audit_name, audits
from twoaxis.study.figures.budgets import control_curve, speedup
from twoaxis.study.figures.curves import losses, paired
from twoaxis.study.figures.differences import contrasts, differences, equal_cost
from twoaxis.study.figures.labels import readable
from twoaxis.study.figures.tradeoffs import costs, pareto
from twoaxis.study.report.text_tables import csv_tables
from twoaxis.study.report_data import ReportData

__all__ = ["NAMES", "Figure", "readable", "study_figures"]

_MAKERS = {
    "differences": (differences, "charged"),
    "losses": (losses, "curves"),
    "charged": (equal_cost, "charged"),
    "pareto": (pareto, "arms"),
    "speedup": (speedup, "speedup"),
    "control-curve": (control_curve, "control_curve"),
    "paired": (paired, "curves"),
    "contrasts": (contrasts, "contrasts"),
    "costs": (costs, "arms"),
}
"""The figures in the order of the page, each with the table of its numbers."""

NAMES = (*_MAKERS, audit_name("*"))
"""The names of all figures that a report can have, as patterns."""


def study_figures(data: ReportData) -> list[Figure]:
    """The figures for which there are results, in the order of the page."""
    data = readable(data)
    trained, left_out = _trained(data)
    # The same colours in all figures.
    data = data.replace(arms=trained.arms | data.arms)
    # Six decimals, so that pages stay small; the files beside a report have all digits.
    tables = {name: re.sub(r"(\.\d{6})\d+", r"\1", text) for name, text in csv_tables(data).items()}
    drawn: list[tuple[Figure, str]] = []
    for make, table in _MAKERS.values():
        # What an arm costs is known however it was trained.
        shown, more = (data, "") if make is costs else (trained, left_out)
        if (figure := make(shown)) is not None:
            drawn.append((replace(figure, caption=figure.caption + more), table))
    first = {table: figure for figure, table in reversed(drawn)}
    # A table that two figures share is in the page once.
    made = [replace(one, csv=tables[of] if first[of] is one else f"#figure-{first[of].name}") for one, of in drawn]
    return [*made, *audits(data)]


def _trained(data: ReportData) -> tuple[ReportData, str]:
    """The report without the arms that were not trained, whose losses would set every scale, and a sentence that names them."""
    untrained = data.gate.not_trained if data.gate is not None else ()
    if not untrained:
        return data, ""
    arms = {name: arm for name, arm in data.arms.items() if name not in untrained}
    contrasts = tuple(one for one in data.contrasts if not {one.arm, one.against} & set(untrained))
    return data.replace(arms=arms, contrasts=contrasts), f" Not drawn, since not trained: {', '.join(untrained)}."
