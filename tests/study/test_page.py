"""The page, the figures and the tables of a report, all made from one file of data."""

import csv
import io
import json
import math
import re
import statistics
from html import unescape
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import altair as alt
import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twoaxis.display import numbers as words
from twoaxis.display.html import POLICY, breakable
from twoaxis.display.theme import ARMS
from twoaxis.study.figures import readable, study_figures
from twoaxis.study.figures.budgets import speedup
from twoaxis.study.figures.labels import OVERLAP, Frame, place_labels, spread
from twoaxis.study.page import render_page
from twoaxis.study.report import write_report_files
from twoaxis.study.report.text_tables import csv_tables, tuning_table
from twoaxis.study.report_data import GateData, PairingData, ReportData, SpeedupData, TuningData, read_report

from .report_example import DIVERGED, example, example_figures

FRAME = Frame((0, 400), (0, 300), 400, 300)

MOST_BYTES = 670_000
"""Of a page with 17 arms, five audits and a ladder of budgets; one with 12 arms and a ladder has 475 kB."""


class Page(HTMLParser):
    """Collects what a page refers to and what it says."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.labels: list[str] = []
        self.text = ""
        self.silent = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.silent += tag in ("style", "script")
        found = {name: value or "" for name, value in attrs}
        self.ids += [found["id"]] if "id" in found else []
        self.links += [found[name] for name in ("src", "href", "xlink:href", "action") if name in found]
        if tag == "svg" and found.get("role") == "img":
            self.labels.append(found["aria-labelledby"])

    def handle_endtag(self, tag: str) -> None:
        self.silent -= tag in ("style", "script")

    def handle_data(self, data: str) -> None:
        self.text += "" if self.silent else data


@pytest.fixture(scope="module")
def html(drawn_page: Path) -> str:
    return drawn_page.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(html: str) -> Page:
    return Page(html)


@pytest.fixture(scope="module")
def style(html: str) -> str:
    return html.partition("<style>")[2].partition("</style>")[0]


def test_the_page_needs_nothing_else(page: Page, html: str) -> None:
    assert not {"iframe", "img", "object", "embed", "form"} & set(page.tags)
    assert page.tags.count("link") == 1 and page.tags.count("script") == 1
    outside = [link for link in page.links if not link.startswith(("#", "data:text/csv"))]
    assert outside == ["data:,"]
    assert {link[1:] for link in page.links if link.startswith("#")} <= set(page.ids)
    assert "://" not in html and "@import" not in html and "url(h" not in html
    assert f'content="{POLICY}"' in html and POLICY.startswith("default-src 'none'")


def test_ids_are_unique_and_what_figures_refer_to_is_there(page: Page, html: str) -> None:
    assert len(page.ids) == len(set(page.ids))
    assert set(re.findall(r"url\(#([^)]+)\)", html)) <= set(page.ids)


def test_the_page_is_small(html: str) -> None:
    assert len(html.encode()) < MOST_BYTES


def test_question_and_answer_come_first(page: Page, html: str) -> None:
    data = example()
    first, rest = page.text[page.text.index("Study report") :].split("Along training", 1)
    gate = "Control 3.85 nats, below the bigram 4.16 and above the trigram 3.70."
    order = (data.question, data.answer, gate, "Difference to residual", "comparisons in the family", "what would", "what next")
    assert sorted(map(first.index, order)) == [first.index(each) for each in order]
    assert rest.index("Cost and trade-off") < rest.index("Appendix") < rest.index("Result by arm")
    assert "<it>" not in html and "&amp; is &lt;it&gt; worth it?" in html


def test_the_page_says_what_the_data_say(page: Page) -> None:
    data = readable(example())
    first = example_figures()[0].wide
    for name, arm in data.arms.items():
        if arm.control or not (comparison := arm.charged[data.charge].comparison):
            continue
        assert comparison.ci95 is not None
        assert words.interval(*comparison.ci95) in page.text and arm.sentence in page.text
        if arm.role == "companion":
            continue
        assert comparison.simultaneous is not None, name
        (row,) = {json.dumps(row): row for row in drawn_rows(first) if row.get("label") == name and "cut_low" in row}.values()
        assert [row["low"], row["high"], *row["own"]] == [*comparison.simultaneous, *comparison.ci95]
        assert row["verdict"] in comparison.remark and words.interval(*comparison.simultaneous) in row["text"]
    for text in (data.decision_rule, data.overturn, data.command, data.pairing.sentence, *data.limits):
        assert text in page.text
    assert all(found.why in page.text for found in data.contrasts)


def drawn_rows(chart: Any) -> list[dict[str, Any]]:
    """All rows of data in a specification, with positions and marks of layers that draw them left out."""
    if isinstance(chart, list):
        return [row for each in chart for row in drawn_rows(each)]
    if not isinstance(chart, dict):
        return []
    own = [{k: v for k, v in row.items() if k not in ("x", "to", "from")} for row in chart.get("data", {}).get("values", ())]
    return own + [row for key, each in chart.items() if key != "data" for row in drawn_rows(each)]


def test_an_arm_that_lost_a_run_gets_no_verdict_and_the_run_is_shown(page: Page, html: str) -> None:
    arm, seed = "mhc: static", DIVERGED[1]
    assert f"No verdict: {arm} has 2 of 3 replicates (diverged)." in page.text
    assert "50 of 51 runs have finished" in page.text
    lost = html.partition("Runs that did not finish</span>")[2].partition("</table>")[0]
    assert re.findall(r'<th scope="row"[^>]*>(.*?)</th><td[^>]*>([^<]*)</td>', lost) == [(breakable(arm), str(seed))]


def test_readers_see_no_placeholders(page: Page) -> None:
    visible = page.text
    assert not re.search(r"\b(nan|NaN|None|null|inf|undefined|True|False)\b", visible)
    assert not re.search(r"\s-\d", visible), "a hyphen stands for a minus sign"


def test_every_figure_is_told_in_words(page: Page, html: str) -> None:
    names = [figure.name for figure in example_figures()]
    order = "differences losses charged pareto speedup control-curve paired contrasts costs"
    assert names[:9] == order.split()
    assert len(names) == len(set(names)) == 14
    assert len(page.labels) == 2 * len(names), "one for each width"
    assert page.labels == [f"said-{name}" for name in re.findall(r'<figure id="figure-([^"]+)">', html) for _ in "12"]
    assert all(f"{figure.title}. {figure.alternative}" in page.text for figure in example_figures())
    for name, arm in readable(example()).arms.items():
        if arm.mean_loss is not None and not arm.control:
            of = ("losses", "costs", "differences" if arm.role == "treatment" else "contrasts")
            assert all(name in figure.alternative for figure in example_figures() if figure.name in of)


@pytest.fixture(scope="module")
def drawings(html: str) -> dict[str, list[str]]:
    """The wide and the narrow drawing of every figure, by name."""
    found = re.findall(r'<figure id="figure-([^"]+)">(.*?)</figure>', html, re.DOTALL)
    return {name: re.findall(r"<svg.*?</svg>", inner, re.DOTALL) for name, inner in found}


def test_figures_name_every_arm_they_draw(drawings: dict[str, list[str]]) -> None:
    for name, roles in {"differences": "treatment", "charged": "treatment", "costs": "all", "losses": "all"}.items():
        texts = {unescape(text) for text in re.findall(r"<text[^>]*>([^<]*)</text>", drawings[name][0])}
        arms = {arm for arm, of in readable(example()).arms.items() if roles in ("all", of.role)}
        assert len(arms) >= 7 and arms <= texts, name
        assert "~" not in "".join(texts)


def test_figures_follow_the_schema_of_vega_lite() -> None:
    # Few arms: the check is slow, and more of them are drawn alike.
    drawn = study_figures(example(2, ("muddformer", "muddformer~static", "muddformer~short_swa@flops")))
    assert {figure.name for figure in drawn} >= {figure.name for figure in example_figures()[:9]}
    check = jsonschema.Draft7Validator(alt.load_schema())
    for figure in (*drawn, *example_figures()[9:]):
        assert check.is_valid(json.loads(json.dumps(figure.wide))), figure.name
    assert not check.is_valid({**drawn[0].wide, "hconcat": 1, "layer": 2})


def test_the_page_maps_every_colour_of_the_figures(drawings: dict[str, list[str]], style: str) -> None:
    every = "".join(drawing for both in drawings.values() for drawing in both)
    used = set(re.findall(r' (fill|stroke)="(#[0-9a-fA-F]{3,6}|rgb[^"]*|[a-z]+)"', every))
    assert len(used) > 20
    unmapped = {color for kind, color in used if f'.plot [{kind}="{color}"]' not in style}
    assert unmapped <= {"none", "transparent"}


def variables(block: str) -> dict[str, str]:
    return dict(re.findall(r"(--[\w-]+): (#[0-9a-f]{6})", block))


def luminance(color: str) -> float:
    linear = [
        value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4
        for value in (int(color[at : at + 2], 16) / 255 for at in (1, 3, 5))
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_text_stands_out_in_light_and_dark(style: str) -> None:
    light, *dark = (block for block in re.findall(r"\{([^{}]*--ground:[^{}]*)\}", style))
    assert len(dark) == 2 and variables(dark[0]) == variables(dark[1]), "by choice and by system must look alike"
    for block in (light, dark[0]):
        color = variables(block)
        texts = ["--ink", "--muted", "--control", "--companion", "--accent", *(f"--arm-{n}" for n in range(1, 8))]
        for text in texts:
            assert contrast(color[text], color["--card"]) >= 4.5, text
        for text in ("--ink", "--muted", "--accent"):
            assert contrast(color[text], color["--ground"]) >= 4.5, text
        for tone in ("--better", "--worse", "--undecided"):
            assert contrast(color[tone], color[f"{tone}-soft"]) >= 4.5, tone
    assert [variables(light)[f"--arm-{n}"] for n in range(1, 8)] == list(ARMS), "a file and the page must look alike"


def test_tables_hold_all_digits() -> None:
    data, made = example(), csv_tables(example())
    arms = list(csv.DictReader(io.StringIO(made["arms"])))
    assert [row["arm"] for row in arms] == list(data.arms)
    charged = {(row["arm"], row["charge"]): row for row in csv.DictReader(io.StringIO(made["charged"]))}
    for name, arm in data.arms.items():
        for charge, found in arm.charged.items():
            row = charged[name, charge]
            if found.comparison is None:
                assert row["difference"] == row["verdict"] == "" and row["unavailable"]
            else:
                assert float(row["difference"]) == statistics.fmean(found.comparison.paired_differences)
                assert found.comparison.ci95 and float(row["ci95_low"]) == found.comparison.ci95[0]
                ends = [float(end) for end in (row["simultaneous_low"], row["simultaneous_high"]) if end]
                assert ends == list(found.comparison.simultaneous or ()) and int(row["family"]) == found.comparison.family
    assert len(list(csv.DictReader(io.StringIO(made["curves"])))) == sum(len(run.curve) for run in data.runs)
    ablations = [one for arm in data.arms.values() for one in (arm.audit or {}).get("ablations", ())]
    written = list(csv.DictReader(io.StringIO(made["ablations"])))
    assert [float(row["loss_change"]) for row in written] == [one["loss_change"] for one in ablations] != []
    assert not re.search(r"\b(None|nan)\b", "".join(made.values()))


def test_a_trial_that_has_not_ended_did_not_diverge() -> None:
    losses = {"a": {"0.01": 7.7}, "b": {"0.01": None, "0.02": None}}
    tuning = TuningData(seed=9, losses=losses, chosen={}, tokens=10)
    assert tuning_table(example().replace(tuning=tuning))[1] == [
        ["a", "7.7000", "\u2014", "not chosen yet"],
        ["b", "diverged", "diverged", "none trained"],
    ]


def test_a_speedup_outside_the_budgets_says_on_which_side() -> None:
    found = SpeedupData(value=None, low=None, high=None, sentence="", beyond=("less", 0.45))
    data = example(2, ("muddformer", "deep_delta"))
    name = next(name for name, arm in data.arms.items() if arm.speedup)
    data = data.replace(arms={**data.arms, name: data.arms[name].replace(speedup={"flops": found})})
    figure = speedup(data)
    assert figure is not None and "less than 0.45\u00d7" in json.dumps(figure.draw(900).to_dict(), ensure_ascii=False)
    assert "less than 0.45\u00d7" in Page(render_page(data, [])).text


def test_chosen_rate_with_many_digits_is_marked() -> None:
    tuning = TuningData(seed=9, losses={"a": {"0.00123457": 3.0, "0.01": 4.0}}, chosen={"a": 0.0012345678}, tokens=10)
    assert [tuning.is_chosen("a", rate) for rate in tuning.rates] == [True, False]
    rows = list(csv.DictReader(io.StringIO(csv_tables(example().replace(tuning=tuning))["tuning"])))
    assert [row["chosen"] for row in rows] == ["true", "false"]


def test_all_files_are_written(tmp_path: Path) -> None:
    data = example(2, ("muddformer", "muddformer~static"))
    files = write_report_files(data, tmp_path)
    figures = [path for path in files if path.parent.name == "figures"]
    schema = json.loads((tmp_path / "report.schema.json").read_text())
    jsonschema.validate(json.loads(json.dumps(data.to_data())), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(data.to_data() | {"complete": "perhaps"}, schema)
    drawn = {figure.name: figure for figure in study_figures(data)}
    first = next(iter(drawn.values()))
    assert f">{first.title}</h3>" in files[0].read_text()
    assert first.inline("wide") == first.inline("wide"), "the same data make the same page"
    assert sorted(path.name for path in figures) == sorted(f"{name}.{kind}" for name in drawn for kind in ("png", "svg"))
    for path in figures:
        if path.suffix == ".svg":
            assert drawn[path.stem].title in "".join(ElementTree.parse(path).getroot().itertext())
        else:
            content = path.read_bytes()
            assert content.startswith(b"\x89PNG")
            assert min(int.from_bytes(content[at : at + 4], "big") for at in (16, 20)) > 200
    written = {path for path in tmp_path.rglob("*") if path.is_file()}
    assert written == set(files)


def test_arms_that_were_not_trained_set_no_scale() -> None:
    """One of them ends 2.3 nats above all others, whose differences would shrink to dots beside it."""
    report = read_report(Path(__file__).parents[2] / "studies" / "results" / "depthbench")
    assert report.gate is not None and report.gate.not_trained == ("sandwich", "deepnorm")
    drawn = {figure.name: figure for figure in study_figures(report)}
    costs = drawn.pop("costs")
    assert "deepnorm" in costs.alternative and "Not drawn" not in costs.caption
    for figure in drawn.values():
        assert figure.caption.endswith("Not drawn, since not trained: sandwich, deepnorm.")
        assert "deepnorm" not in figure.alternative and "deepnorm" in figure.csv + drawn["differences"].csv
    seconds = list(ElementTree.fromstring(drawn["charged"].svg()).itertext())
    assert "no verdict" in seconds and not any("outside the budgets" in text for text in seconds), "a reason leaves its panel"


def test_a_report_before_any_run_has_finished() -> None:
    data = nothing_yet()
    assert study_figures(data) == []
    text = Page(render_page(data, [])).text
    assert "0 of 51 runs have finished" in text
    assert not re.search(r"\b(nan|None|null|inf)\b", text)


def nothing_yet() -> ReportData:
    data = example()
    unknown = dict.fromkeys((
        "mean_loss", "parameters", "training_flops_per_token", "training_flops", "step_seconds", "step_seconds_ratio",
        "seconds", "predicted_memory_bytes", "peak_memory_bytes", "peak_memory_ratio", "tokens_per_second",
        "tokens_per_second_ratio", "front_seconds", "front_memory", "verdict", "audit",
    ))  # fmt: skip
    arms = {
        name: arm.replace(
            **unknown, losses={}, replicates=0, charged={}, speedup={}, no_verdict="0 of 3 replicates (not started)"
        )
        for name, arm in data.arms.items()
    }
    runs = [
        run.replace(status="not started", message="", loss=None, curve=(), result=None, recipe={}, data={}, environment={})
        for run in data.runs
    ]
    return data.replace(arms=arms, runs=tuple(runs), contrasts=(), curves={}, tuning=None, timing=None, spent={})


def test_the_page_shows_how_parameters_were_optimised_and_both_timings(page: Page) -> None:
    text = page.text
    assert "Optimiser groups: all of residual" in text and "Median seconds of a step before the runs and after the last" in text
    assert "A trial reads 512 k tokens." in text and "a better rate may lie outside: mhc." in text
    assert "Seconds before and after the runs agree within their error." in text


@pytest.mark.parametrize(
    ("passed", "words"),
    [(True, "Gate passed."), (False, "Gate failed."), (None, "Gate unknown.")],
    ids=["yes", "no", "unknown"],
)
def test_the_page_says_whether_the_control_was_trained(passed: bool | None, words: str) -> None:
    gate = GateData(passed=passed, sentence="Control 5.39 nats.", reasons=("no better than counts",), change="Change the rate.")
    text = Page(render_page(nothing_yet().replace(gate=gate), [])).text
    assert all(part in text for part in (words, "Control 5.39 nats.", "no better than counts.", "Change the rate."))
    assert "has no validity gate" in Page(render_page(nothing_yet().replace(gate=None), [])).text


def test_broken_pairs_stand_out() -> None:
    pairing = PairingData(
        verified=False, sentence="ERROR: the pairing is broken.", pairs=({"arm": "mhc", "problems": ["start"]},)
    )
    text = render_page(nothing_yet().replace(pairing=pairing), [])
    assert text.count('<p class="error">ERROR: the pairing is broken.</p>') == 2


def test_without_scripts_everything_is_there(page: Page, html: str) -> None:
    assert html.count('<div class="panel" data-title=') == 3
    assert " hidden>" not in html.replace('aria-pressed="false" hidden>', "")


@given(st.lists(st.floats(0, 300), min_size=1, max_size=20))
def test_labels_at_the_end_of_lines_stay_apart_and_in_order(wanted: list[float]) -> None:
    placed = spread(wanted, gap=12, low=0, high=300)
    assert all(0 <= place <= 300 for place in placed)
    assert all(after - before >= 12 - 0.02 for before, after in pairwise(sorted(placed)))
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    assert sorted(order, key=lambda index: placed[index]) == order


@given(st.lists(st.tuples(st.floats(0, 400), st.floats(0, 300)), min_size=1, max_size=20), st.integers(0, 20))
def test_labels_beside_points_cover_nothing_and_are_nearest_to_their_own(points: list[tuple[float, float]], n: int) -> None:
    named = points[:n]
    found = place_labels(points, ["block_attnres"] * len(named), FRAME)
    length, half = 0.56 * 11 * len("block_attnres"), 0.55 * 11
    placed = [(own, place) for own, place in zip(named, found, strict=True) if place is not None]
    boxes = [(place.x, place.y - half, place.x + length, place.y + half) for _, place in placed]
    for at, one in enumerate(boxes):
        assert one[0] >= 0 and one[1] >= 0 and one[2] <= 400 and one[3] <= 300
        assert not any(one[0] < x < one[2] and one[1] < y < one[3] for x, y in points)
        own, *others = (
            math.dist((x, y), (min(max(x, one[0]), one[2]), min(max(y, one[1]), one[3]))) for x, y in (placed[at][0], *named)
        )
        assert all(own <= other + OVERLAP + 1e-9 for other in others)
        for other in boxes[:at]:
            assert one[2] < other[0] or other[2] < one[0] or one[3] < other[1] or other[3] < one[1]
