"""The kept studies: each has passed the gate or has no verdict, and every design that no longer stands says why."""

import json
import tomllib
from pathlib import Path

import pytest

from twoaxis.display import numbers as words
from twoaxis.study import read_study
from twoaxis.study.report import write_report
from twoaxis.study.report.answer import answer, outlook
from twoaxis.study.report.validity import with_gate
from twoaxis.study.report.verdicts import verdict_sentence
from twoaxis.study.report_data import ReportData, read_report
from twoaxis.study.running.baselines import Baselines, SeedBaselines

STUDIES = Path(__file__).parents[2] / "studies"
DESIGNS = tomllib.loads((STUDIES / "superseded" / "designs.toml").read_text(encoding="utf-8"))
KEPT = sorted((STUDIES / "results").glob("*/report.json"))
OLD = STUDIES / "superseded" / "depth_retrieval_3"


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.parent.name)
def test_a_kept_result_has_a_gate_and_intervals_that_agree_with_its_verdicts(path: Path) -> None:
    report = read_report(path)
    assert report.gate is not None and report.gate.passed is not None
    if not report.gate.passed:
        assert not any(arm.verdict for arm in report.arms.values())
    for arm in report.arms.values():
        found = arm.charged.get(report.charge)
        if arm.verdict and found and found.comparison and found.comparison.simultaneous:
            low, high = found.comparison.simultaneous
            assert arm.verdict == ("better" if high <= 0 else "worse" if low >= 0 else "undecided")
            assert found.comparison.family >= sum(one.role == "treatment" for one in report.arms.values())
    assert len(report.answer.split()) <= 20


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.parent.name)
def test_a_kept_page_is_short_and_draws_the_intervals_of_the_verdicts(path: Path) -> None:
    """Catches a page of an older version, and one that draws uncorrected intervals or hides what the study asks."""
    report, page = read_report(path), path.with_name("report.html").read_text(encoding="utf-8")
    assert len(page.encode()) <= 500_000
    assert [name for name in ("answer", "training", "cost", "appendix", "design") if f' id="{name}"' not in page] == []
    head = page[page.index('<header id="answer">') : page.index("</header>")]
    assert head.count("<figure") == 1 and all(f"<dd>{text}</dd>" in head for text in outlook(report))
    asked = {f"{one.arm} {words.MINUS} {one.against}": one.comparison for one in report.contrasts}
    asked |= {name: found.comparison for name, arm in report.arms.items() if (found := arm.charged.get(report.charge))}
    ended = [one for one in asked.values() if one and one.verdict in ("better", "worse") and 0.0 in (one.simultaneous or ())]
    assert ("A bar that ends at zero excludes it" in head) == bool(ended)
    untrained = report.gate.not_trained if report.gate else ()
    assert all(f"{name} does not beat the control's bigram" in head.replace("&#39;", "'") for name in untrained)
    for label, one in asked.items():
        if one is not None and label not in untrained:
            assert one.simultaneous and one.ci95
            text = f"{label}: {words.signed(one.mean_difference)}, {words.interval(*one.simultaneous)}, own 95 % interval "
            assert head.count(f'aria-label="{text}{words.interval(*one.ci95)}, ') == 2, "a bar at two widths"
            drawn = f"{words.signed(one.mean_difference)}  ({words.interval(*one.simultaneous)})"
            assert f">{drawn}</text>" in head


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.parent.name)
def test_a_kept_result_says_what_would_be_said_now_of_its_numbers(path: Path) -> None:
    """Catches sentences of an older version on numbers that have not changed."""
    report, study = read_report(path), read_study(STUDIES / f"{path.parent.name}.toml")
    for name, arm in report.arms.items():
        if arm.role == "treatment":
            assert arm.sentence == verdict_sentence(study, name, arm.charged[report.charge].comparison, arm.no_verdict)
    assert not [limit for limit in report.limits if "charges" in limit]


def test_answer_and_outlook_of_a_study_of_twelve_arms_are_short() -> None:
    kept = read_report(STUDIES / "results" / "shortcut")
    kinds = {"better": -1.0, "worse": 1.0, "undecided": 0.0}
    for verdicts in (("better", "worse", "undecided", None), ("worse", "undecided", None), ("undecided",), ("better",)):
        arms = {name: arm for name, arm in kept.arms.items() if arm.control}
        for number in range(12):
            like, verdict = kept.arms["deep_delta"], verdicts[number % len(verdicts)]
            equal = like.charged["tokens"]
            assert equal.comparison is not None
            one = equal.comparison.replace(
                verdict=verdict, mean_difference=kinds.get(verdict or "", 0.0), replicates_needed=6 + number
            )
            charged = {"seconds": equal.replace(comparison=one)}
            arms[f"an_arm_{number}"] = like.replace(
                charged=charged, verdict=verdict, no_verdict="" if verdict else "not trained"
            )
        report = kept.replace(arms=arms, contrasts=(), charge="seconds")
        assert len(answer(report).split()) <= 20, answer(report)
        decide, following = outlook(report)
        assert len(decide.split()) <= 25 and len(following.split()) <= 45
        assert ("replicates, now 5" in decide) == ("undecided" in verdicts) and ("decided" in decide or "replicates" in decide)
        assert ("another size" in following) == ("better" in verdicts)


@pytest.mark.parametrize("name", DESIGNS)
def test_a_design_that_no_longer_stands_says_why_and_keeps_its_report(name: str) -> None:
    entry, folder = DESIGNS[name], STUDIES / "superseded" / name
    assert set(entry) == {"of", "status", "on", "reported", "why"} and entry["status"] in ("withdrawn", "superseded")
    assert name.rpartition("_")[0] == entry["of"] and len(entry["why"]) > 40
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    assert report["question"] and report["design"]["replicates"]
    if entry["status"] == "withdrawn":
        gated = read_report(folder)
        assert gated.gate is not None and gated.gate.passed is False and gated.gate.control is not None
        assert f"{gated.gate.control:.2f}" in entry["why"] and f"{gated.gate.bigram:.2f}" in entry["why"]
        assert not any(arm.verdict for arm in gated.arms.values())
        assert not any(one.comparison and one.comparison.verdict for one in gated.contrasts)
        assert read_study(folder.with_suffix(".toml")).question == gated.question


def test_every_superseded_report_is_listed() -> None:
    assert {path.parent.name for path in (STUDIES / "superseded").glob("*/report.json")} == set(DESIGNS)


def before_the_gate(report: ReportData) -> ReportData:
    arms = {
        name: arm.replace(
            charged={
                charge: one.replace(
                    comparison=one.comparison and one.comparison.replace(simultaneous=None, family=0, suggestive=False)
                )
                for charge, one in arm.charged.items()
            }
        )
        for name, arm in report.arms.items()
    }
    return report.replace(gate=None, findings=(), arms=arms, answer="what was said then")


@pytest.fixture
def old() -> ReportData:
    return before_the_gate(read_report(OLD))


def test_an_answer_names_the_arm_that_the_study_asks_about() -> None:
    report = read_report(STUDIES / "results" / "local" / "report.json")
    rest = "3 of 8 arms lower the loss, 1 raises it."
    assert answer(report) == f"At equal tokens, short_swa_8 is undecided (+0.014 nats); {rest}"


def baselines(chance: float) -> Baselines:
    one = SeedBaselines(chance=chance, majority=0.04, in_context=0.67, counted=9600)
    return Baselines(by_seed=dict.fromkeys(range(51, 56), one))


def test_an_old_report_gets_its_gate_and_the_intervals_of_its_verdicts(old: ReportData) -> None:
    gated = with_gate(old, baselines(3.3))
    assert gated.gate is not None and gated.gate.passed
    kept = read_report(OLD)
    for name, arm in gated.arms.items():
        assert arm.verdict == kept.arms[name].verdict and arm.losses == old.arms[name].losses
        if not arm.control:
            now, then = arm.charged["tokens"].comparison, old.arms[name].charged["tokens"].comparison
            assert now is not None and then is not None and now.family == 5 and now.simultaneous is not None
            assert now.p_holm == pytest.approx(then.p_holm) and now.ci95 == pytest.approx(then.ci95)
    assert gated.answer.startswith("At equal tokens, 3 of 5 arms lower the loss")


def test_an_old_report_of_an_untrained_control_loses_its_verdicts(old: ReportData) -> None:
    gated = with_gate(old, baselines(1.0))
    assert gated.gate is not None and gated.gate.passed is False
    assert gated.answer == "No verdict: the control was not trained; its answers are no better than guesses."
    for name, arm in gated.arms.items():
        assert arm.verdict is None
        if not arm.control:
            assert arm.sentence == f"{name}: no verdict, the control was not trained."


def test_a_report_alone_is_gated_where_its_text_is_at_hand(
    old: ReportData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps(old.to_data()))
    monkeypatch.setattr("twoaxis.study.report.validity.measure_baselines", lambda *_: Baselines(missing="no such corpus"))
    monkeypatch.setattr("twoaxis.study.figures.study_figures", lambda _: [])
    write_report(tmp_path)
    assert read_report(path).gate is None, "not known, so left as it was"
    monkeypatch.setattr("twoaxis.study.report.validity.measure_baselines", lambda *_: baselines(3.3))
    write_report(tmp_path)
    gate = read_report(path).gate
    assert gate is not None and gate.passed
