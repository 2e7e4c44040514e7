"""The report: one file for readers that needs nothing else, with the numbers of the file for machines."""

import json
import re
from html import unescape
from html.parser import HTMLParser

import pytest

from twoaxis.core.errors import StudyError
from twoaxis.study import words
from twoaxis.study.report import Report, write_report

from .scripted import FakeTrainer


class Page(HTMLParser):
    """Collects what a page refers to and what it says."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.references: list[str] = []
        self.ids: list[str] = []
        self.text = ""
        self.open: list[str] = []
        self.rows: list[list[str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.open.append(tag)
        self.ids += [value for name, value in attrs if name == "id" and value]
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "data", "action")]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def test_the_page_needs_nothing_else(report: Report) -> None:
    text = report.html.read_text()
    page = Page(text)
    assert not {"script", "link", "iframe", "img"} & set(page.tags)
    assert not page.references
    assert "://" not in text and "@import" not in text
    assert set(re.findall(r"url\(#([^)]+)\)", text)) <= set(page.ids)
    assert len(page.ids) == len(set(page.ids)), "figures must not share ids"


def test_the_page_says_what_the_numbers_say(report: Report) -> None:
    page, data = Page(report.html.read_text()), json.loads(report.json.read_text())
    rows = {row[0]: row for row in page.rows if row}
    for name, arm in data["arms"].items():
        assert rows[name]
        if not arm["control"]:
            low, high = arm["ci95"]
            shown = next(row for row in page.rows if row[0] == name)
            assert shown[3] == words.interval(low, high)
            assert shown[2] == words.signed(arm["mean_difference"])
            assert shown[4] == arm["verdict"]
            assert arm["sentence"] in page.text
    assert data["arms"]["delta"]["verdict"] == "better"
    assert data["pairing"]["verified"]
    assert len(data["runs"]) == 9 and len(data["runs"][0]["curve"]) == 3
    assert data["decision_rule"] in page.text


def test_the_page_has_three_figures_with_all_arms(report: Report) -> None:
    text = report.html.read_text()
    figures = re.findall(r"<figure>(.*?)</figure>", text, re.DOTALL)
    assert len(figures) == 3
    for figure, arms in zip(
        figures, [("plain", "delta", "local"), ("delta", "local"), ("plain", "delta", "local")], strict=True
    ):
        assert figure.count("<svg") == 1
        drawn = unescape("".join(re.findall(r"<text[^>]*>([^<]*)</text>", figure)))
        assert all(arm in drawn for arm in arms)


def test_figures_are_pictures_too(report: Report) -> None:
    assert [path.name for path in report.pictures] == ["report-curves.png", "report-differences.png", "report-costs.png"]
    for path in report.pictures:
        content = path.read_bytes()
        assert content.startswith(b"\x89PNG")
        assert min(int.from_bytes(content[at : at + 4], "big") for at in (16, 20)) > 200


def test_text_is_escaped(report: Report) -> None:
    text = report.html.read_text()
    assert "<it>" not in text
    assert "Is &lt;it&gt; better &amp; why?" in text


def test_readers_see_no_placeholders(trainer: FakeTrainer) -> None:
    trainer.actions |= {"local/0": ["diverge"], "delta/1": ["kill"]}
    trainer.run()
    page = Page(write_report(trainer.folder).html.read_text())
    visible = page.text.partition("study.json")[0].replace("loss nan", "")
    assert not re.search(r"\b(nan|NaN|None|null|inf)\b", visible)
    assert "7 of 9 runs have finished" in page.text


def test_a_report_before_any_run_has_finished(trainer: FakeTrainer) -> None:
    trainer.actions = {f"{arm}/{seed}": ["bad input"] for arm in trainer.study.arms for seed in trainer.study.replicates}
    trainer.run()
    report = write_report(trainer.folder)
    assert not report.pictures
    assert "0 of 9 runs have finished" in Page(report.html.read_text()).text
    assert report.data["arms"]["delta"]["verdict"] is None


def test_broken_pairs_stand_out(trainer: FakeTrainer) -> None:
    trainer.actions["delta/1"] = ["other start"]
    trainer.run()
    report = write_report(trainer.folder)
    assert '<p class="error">ERROR: the pairing is broken' in report.html.read_text()
    assert not report.data["pairing"]["verified"]


def test_no_study_no_report(trainer: FakeTrainer) -> None:
    with pytest.raises(StudyError, match=r"study.json: cannot be read.*name a folder that `twoaxis study` has made"):
        write_report(trainer.folder)
