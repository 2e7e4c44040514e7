"""Comparisons at equal cost: the control's loss at the cost of an arm is read off its own runs, and never guessed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from twoaxis.study import StudyConfig
from twoaxis.study.report_data import ReportData
from twoaxis.study.running.study_folder import RunKey, RunRecord

from .conftest import tiny_study
from .scripted import FakeTrainer

BUDGET_MULTIPLES = {"steps": 60, "ladder": [0.5, 0.75, 1.5, 2.0]}


@pytest.fixture(scope="module")
def ran(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[FakeTrainer, dict[RunKey, RunRecord]]:
    """Runs with one losing arm at several budgets of the control; read them only, and analyse them under any rule."""
    folder = tmp_path_factory.mktemp("ran")
    study = StudyConfig.from_data({**tiny_study(corpus), "budget": BUDGET_MULTIPLES})
    trainer = FakeTrainer(study, folder / "study", folder / "script.json")
    trainer.spread(local=-0.01)
    return trainer, trainer.run()


@pytest.fixture
def study(study_data: dict[str, Any]) -> StudyConfig:
    return StudyConfig.from_data(study_data | {"budget": BUDGET_MULTIPLES})


def _report(trainer: FakeTrainer) -> ReportData:
    return trainer.analyse()


def test_an_expensive_arm_is_compared_with_a_control_that_spends_as_much(
    ran: tuple[FakeTrainer, dict[RunKey, RunRecord]],
) -> None:
    trainer, records = ran
    report = trainer.analyse(records)
    local = report.arms["local"]
    tokens, flops = local.charged["tokens"], local.charged["flops"]
    assert tokens.comparison is not None and flops.comparison is not None
    assert tokens.cost_ratio == 1.0 and flops.cost_ratio is not None and flops.cost_ratio > 1.1
    # The scripted control falls by C^-0.3 - 1, so at the arm's cost it is lower by exactly this.
    falls = flops.cost_ratio**-0.3 - 1
    assert tokens.comparison.mean_difference == pytest.approx(-0.01, abs=0.001)
    assert flops.comparison.mean_difference == pytest.approx(-0.01 - falls, abs=0.005)
    assert tokens.comparison.mean_difference < flops.comparison.mean_difference
    assert (tokens.comparison.verdict, flops.comparison.verdict) == ("better", "worse")
    assert report.answer == "At equal tokens the loss is lower for local (\u22120.01 nats), undecided for delta."
    assert "At equal FLOPs, local, delta are worse." in report.findings
    assert local.speedup["flops"].value is not None and local.speedup["flops"].value < 1
    assert report.curves["flops"].exponent == pytest.approx(0.3, abs=0.05)
    assert len(report.curves["flops"].points) == 15 and all(p.residual is not None for p in report.curves["flops"].points)


def test_the_design_says_which_cost_decides(
    study_data: dict[str, Any], trainer: FakeTrainer, ran: tuple[FakeTrainer, dict[RunKey, RunRecord]]
) -> None:
    for charge, verdict in (("tokens", "better"), ("flops", "worse"), ("seconds", "worse")):
        data = {**study_data, "budget": BUDGET_MULTIPLES, "decision": {"smallest_effect": 0.05, "charge": charge}}
        trainer.study = StudyConfig.from_data(data)
        report = trainer.analyse(ran[1])
        assert report.arms["local"].verdict == verdict
        assert f"at equal {charge.replace('flops', 'FLOPs')}" in report.arms["local"].sentence


def test_nothing_is_extrapolated(study_data: dict[str, Any], trainer: FakeTrainer) -> None:
    trainer.study = StudyConfig.from_data({**study_data, "budget": {"steps": 60, "ladder": [0.5, 0.75]}})
    trainer.spread(local=-0.01)
    local = _report(trainer).arms["local"]
    assert local.charged["tokens"].comparison is not None
    assert local.charged["flops"].comparison is None
    assert "nothing is extrapolated" in local.charged["flops"].unavailable
    found = local.speedup["flops"]
    assert found.value is None and found.beyond is not None and found.sentence.startswith(found.outside)


def test_arms_of_unequal_cost_are_not_contrasted_at_equal_cost(study_data: dict[str, Any], trainer: FakeTrainer) -> None:
    contrasts = [{"arm": "delta", "against": "local", "why": "which is better"}]
    decision = {"smallest_effect": 0.05, "charge": "flops"}
    data = {**study_data, "budget": BUDGET_MULTIPLES, "decision": decision, "contrasts": contrasts}
    trainer.study = StudyConfig.from_data(data)
    trainer.spread(delta=-0.2)
    records = trainer.run()
    report = trainer.analyse(records)
    (one,) = report.contrasts
    delta, local = (report.arms[name].training_flops for name in ("delta", "local"))
    assert delta and local and abs(delta / local - 1) > 0.02
    assert one.comparison is None and one.no_verdict.startswith(f"takes {delta / local:.3f} times the FLOPs of local")
    assert any(one.no_verdict in note for note in trainer.plan.notes), "known before the first run"
    trainer.study = trainer.study.replace(decision={"smallest_effect": 0.05})
    (one,) = trainer.analyse(records).contrasts
    assert one.comparison is not None and one.comparison.verdict == "better" and not one.no_verdict


def test_without_budget_multiples_only_what_is_equal_is_compared(study_data: dict[str, Any], trainer: FakeTrainer) -> None:
    trainer.study = StudyConfig.from_data(study_data)
    trainer.spread()
    report = _report(trainer)
    assert not report.curves
    local = report.arms["local"]
    assert "budget.ladder" in local.charged["flops"].unavailable and not local.speedup
    assert local.charged["tokens"].comparison is not None


def test_a_missing_budget_leaves_the_curve_out(trainer: FakeTrainer) -> None:
    trainer.spread(local=-0.01)
    trainer.actions["plain@2x/1"] = ["kill"]
    report = _report(trainer)
    assert "1 runs of the control at its budgets have not finished" in report.arms["local"].charged["flops"].unavailable
    assert report.arms["local"].verdict == "better", "at equal tokens the other budgets are not needed"
    assert not report.complete


def test_fronts_hold_what_no_arm_beats(trainer: FakeTrainer) -> None:
    trainer.spread(delta=+0.1, local=-0.1)
    arms = _report(trainer).arms
    assert {name: arm.front_seconds for name, arm in arms.items()} == {"plain": True, "delta": False, "local": True}


def test_arms_and_contrasts_are_one_family_and_a_companion_alone_is_no_question(
    study_data: dict[str, Any], trainer: FakeTrainer
) -> None:
    data = {**study_data, "controls": ["write_only", "residual_scalars"]}
    del data["arms"]["local"]
    trainer.study = StudyConfig.from_data(data)
    trainer.spread(delta=-0.1)
    report = _report(trainer)
    assert [name for name, arm in report.arms.items() if arm.role == "companion"] == [
        "~residual_scalars",
        "delta~write_only",
    ] or ([name for name, arm in report.arms.items() if arm.role == "companion"] == ["delta~write_only", "~residual_scalars"])
    one = report.arms["delta"].charged["tokens"].comparison
    assert one is not None and one.family == 3, "one treatment and two contrasts"
    contrasts = {contrast.against: contrast for contrast in report.contrasts}
    assert set(contrasts) == {"delta~write_only", "~residual_scalars"}
    found = contrasts["delta~write_only"].comparison
    assert found is not None and found.verdict == "better" and found.p_holm > found.p and found.family == 3
    companion = report.arms["delta~write_only"]
    alone = companion.charged["tokens"].comparison
    assert companion.verdict is None and companion.no_verdict == "a companion is compared with its arm"
    assert alone is not None and alone.verdict is None and alone.simultaneous is None and alone.ci95 is not None
    assert contrasts["delta~write_only"].sentence.startswith("delta: better than delta~write_only")


@pytest.mark.parametrize("design", [{"match": "flops", "budget": {"steps": 400}}, {"budget": {"flops": 1e10}}])
def test_costs_that_the_design_makes_equal_need_no_other_budgets(
    study_data: dict[str, Any], trainer: FakeTrainer, design: dict[str, Any]
) -> None:
    data = {**study_data, **design, "decision": {"smallest_effect": 0.05, "charge": "flops"}}
    trainer.study = StudyConfig.from_data(data)
    trainer.spread(local=-0.1)
    local = _report(trainer).arms["local"]
    found = local.charged["flops"]
    assert found.cost_ratio != 1.0 and found.cost_ratio == pytest.approx(1, abs=0.005)
    assert local.verdict == "better" and found.comparison is not None
    assert found.comparison.mean_difference == pytest.approx(-0.1, abs=0.005)
    assert local.charged["tokens"].comparison is None


def test_a_budget_of_another_recipe_leaves_the_curve_out(trainer: FakeTrainer) -> None:
    trainer.spread(local=-0.01)
    records = trainer.run()
    key = RunKey("plain@2x", 1)
    other = records[key].recipe | {"optimizer": records[key].recipe["optimizer"] | {"lr": 0.5}}
    report = trainer.analyse({**records, key: replace(records[key], recipe=other)})
    assert "1 runs of the control at its budgets have not finished, or are no pairs" in report.curves["flops"].sentence
    assert "plain@2x seed 1: another recipe than the plan's: optimizer.lr is 0.5, not 0.001" in report.pairing.sentence
