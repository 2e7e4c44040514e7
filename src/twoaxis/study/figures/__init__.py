"""The figures of a report, rendered to SVG and PNG without a browser or the network."""

from twoaxis.display.figures import Figure
from twoaxis.study.figures.audits import audit_name, audits
from twoaxis.study.figures.budgets import control_curve, speedup
from twoaxis.study.figures.curves import losses, paired
from twoaxis.study.figures.differences import contrasts, differences, equal_cost
from twoaxis.study.figures.tradeoffs import costs, pareto
from twoaxis.study.report_data import ReportData

__all__ = ["NAMES", "Figure", "study_figures"]

_MAKERS = {
    "differences": differences,
    "charged": equal_cost,
    "speedup": speedup,
    "control-curve": control_curve,
    "pareto": pareto,
    "costs": costs,
    "losses": losses,
    "paired": paired,
    "contrasts": contrasts,
}

NAMES = (*_MAKERS, audit_name("*"))
"""The names of all figures that a report can have, as patterns."""


def study_figures(data: ReportData) -> list[Figure]:
    """The figures for which there are results, in the order of the page."""
    return [*(figure for make in _MAKERS.values() if (figure := make(data)) is not None), *audits(data)]
