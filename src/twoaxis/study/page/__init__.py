"""The report of a study as one self-contained HTML page: the answer, what supports it, and an appendix of folded sections."""

from collections.abc import Sequence

from twoaxis.display.figures import Figure
from twoaxis.display.html import details, figure, render, section
from twoaxis.study.figures import readable
from twoaxis.study.page.costs import costs
from twoaxis.study.page.head import design, evidence, header, reproduce, runs
from twoaxis.study.page.results import companions, cost, inside, result, speedups, training
from twoaxis.study.report_data import ReportData

__all__ = ["render_page"]


def render_page(data: ReportData, figures: Sequence[Figure]) -> str:
    """Renders the page of a report with its figures."""
    data, drawn = readable(data), {figure.name: figure for figure in figures}
    first = (("training", "Along training", training(drawn)), ("cost", "Cost and trade-off", cost(data, drawn)))
    folded = (
        ("result", "Every number by arm", result(data)),
        ("companions", "Companions", companions(data, drawn)),
        ("paired", "Differences along training", figure(drawn.get("paired"))),
        ("speedup", "Effective speedup", speedups(data, drawn)),
        ("costs", "Costs of each arm", costs(data, drawn)),
        ("inside", "Inside the arms", inside(data, drawn)),
        ("evidence", "How far the evidence reaches", evidence(data)),
        ("reproduce", "Reproduce it", reproduce(data)),
        ("runs", "Runs", runs(data)),
        ("design", "Design", design(data)),
    )
    sections = [(name, title, section(name, title, inner)) for name, title, inner in first]
    appendix = [(name, title, details(title, inner, kind="section", name=name)) for name, title, inner in folded]
    return render(
        "twoaxis.study.page/report.html",
        folder="twoaxis.study.page",
        title=data.question,
        header=header(data, figure(drawn.get("differences"))),
        sections=[each for each in sections if each[2].strip()],
        appendix=[each for each in appendix if each[2].strip()],
        made=data.made,
    )
