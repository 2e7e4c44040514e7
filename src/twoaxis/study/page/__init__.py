"""The report of a study as one self-contained HTML page."""

from collections.abc import Sequence

from twoaxis.display.figures import Figure
from twoaxis.display.html import render, section
from twoaxis.study.page.costs import costs, trade_off
from twoaxis.study.page.head import design, evidence, header, reproduce, runs, verdicts
from twoaxis.study.page.results import companions, equal, inside, result, speedups, training
from twoaxis.study.report_data import ReportData

__all__ = ["render_page"]


def render_page(data: ReportData, figures: Sequence[Figure]) -> str:
    """Renders the page of a report with its figures."""
    drawn = {figure.name: figure for figure in figures}
    sections = (
        ("verdicts", "Verdicts", section("verdicts", "Verdicts", verdicts(data))),
        ("result", "Result", result(data, drawn)),
        ("equal", "Equal cost", equal(data, drawn)),
        ("speedup", "Speedup", speedups(data, drawn)),
        ("trade-off", "Trade-off", trade_off(drawn)),
        ("training", "Training", training(drawn)),
        ("companions", "Companions", companions(data, drawn)),
        ("costs", "Costs", costs(data, drawn)),
        ("inside", "Inside", inside(data, drawn)),
        ("evidence", "Evidence", evidence(data)),
        ("reproduce", "Reproduce", reproduce(data)),
        ("runs", "Runs", runs(data)),
        ("design", "Design", design(data)),
    )
    return render(
        "twoaxis.study.page/report.html",
        folder="twoaxis.study.page",
        title=data.question,
        header=header(data),
        sections=[each for each in sections if each[2]],
        made=data.made,
    )
