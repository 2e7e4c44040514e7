"""The report of a study as one page of HTML that needs nothing else: no file, no font, no network."""

from collections.abc import Sequence
from functools import cache
from html import escape
from importlib.resources import files

from twoaxis.study.figures import Figure
from twoaxis.study.page.answer import header, verdicts
from twoaxis.study.page.costs import costs, trade_off
from twoaxis.study.page.evidence import design, evidence, reproduce, runs
from twoaxis.study.page.html import section
from twoaxis.study.page.inside import inside
from twoaxis.study.page.results import companions, equal, result, speedups, training
from twoaxis.study.report_data import ReportData

__all__ = ["render_page"]

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
"""What a browser may load for the page: nothing that is not in it."""


def render_page(data: ReportData, figures: Sequence[Figure]) -> str:
    """Writes the page.

    Args:
        data: what it says.
        figures: of the same data.
    """
    drawn = {figure.name: figure for figure in figures}
    sections = {
        "Verdicts": section("verdicts", "Verdicts", verdicts(data)),
        "Result": result(data, drawn),
        "Equal cost": equal(data, drawn),
        "Speedup": speedups(data, drawn),
        "Trade-off": trade_off(drawn),
        "Training": training(drawn),
        "Companions": companions(data, drawn),
        "Costs": costs(data, drawn),
        "Inside": inside(data, drawn),
        "Evidence": evidence(data),
        "Reproduce": reproduce(data),
        "Runs": runs(data),
        "Design": design(data),
    }
    sections = {title: text for title, text in sections.items() if text}
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" '
        f'content="{POLICY}">\n<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">\n'
        f"<title>{escape(data.question)}</title>\n<style>{_file('style.css')}</style>\n</head>\n<body>\n"
        f'<a class="skip" href="#answer">Skip to the answer</a>\n{_navigation(sections)}\n<main>\n{header(data)}\n'
        + "\n".join(sections.values())
        + f"\n</main>\n<footer>twoaxis, {escape(data.made)}. All numbers are in report.json beside this page.</footer>\n"
        f"<script>{_file('behaviour.js')}</script>\n</body>\n</html>\n"
    )


def _navigation(sections: dict[str, str]) -> str:
    links = "".join(
        f'<a href="#{text.partition(chr(34))[2].partition(chr(34))[0]}">{title}</a>' for title, text in sections.items()
    )
    toggle = '<button type="button" class="theme" aria-pressed="false" hidden>Dark</button>'
    return f'<nav aria-label="Sections"><div class="links">{links}</div>{toggle}</nav>'


@cache
def _file(name: str) -> str:
    return (files("twoaxis.study.page") / name).read_text(encoding="utf-8")
