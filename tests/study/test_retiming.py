"""Two timings, before the runs and after: where they disagree there is no verdict at equal seconds, and the report says so."""

import math
import random
from pathlib import Path
from typing import Any

import pytest

from twoaxis.study import StudyConfig
from twoaxis.study.report import read_study_folder
from twoaxis.study.report.analysis import analyse
from twoaxis.study.report_data import ReportData
from twoaxis.study.running import measure_again
from twoaxis.study.running.study_folder import RunKey, RunRecord, StudyFolder
from twoaxis.study.timing import Timing, disagreement, pooled

from .conftest import tiny_study
from .scripted import FakeTrainer, fake_timer

BUDGET_MULTIPLES = {"steps": 60, "ladder": [0.5, 0.75, 1.5, 2.0]}

Ran = tuple[FakeTrainer, dict[RunKey, RunRecord]]


def noisy(draw: random.Random, effects: dict[str, float], noise: float = 0.02, rounds: int = 15) -> Timing:
    drift = [draw.gauss(0, 0.2) for _ in range(rounds)]
    return Timing(
        warmup_steps=1,
        steps_in_a_turn=1,
        seconds={name: tuple(math.exp(e + d + draw.gauss(0, noise)) for d in drift) for name, e in effects.items()},
        state_bytes={},
        saved_bytes={},
        environment={},
    )


EFFECTS = {"a": 0.0, "b": 0.1, "c": 0.3, "d": 0.5}


def test_a_slower_machine_is_no_disagreement_and_a_slower_arm_is() -> None:
    draw = random.Random(0)
    before = noisy(draw, EFFECTS)
    assert disagreement(before, noisy(draw, {name: e + 0.7 for name, e in EFFECTS.items()}), "a") == {}
    found = disagreement(before, noisy(draw, {**EFFECTS, "c": 0.4}), "a")
    assert found == {"c": pytest.approx(math.exp(0.1), rel=0.03)}
    moved = disagreement(before, noisy(draw, {**EFFECTS, "a": 0.2}), "a")
    assert set(moved) == {"b", "c", "d"}, "a control that changed changes every ratio"


def test_timings_that_differ_by_chance_alone_seldom_disagree() -> None:
    draw = random.Random(1)
    wrong = sum(bool(disagreement(noisy(draw, EFFECTS), noisy(draw, EFFECTS), "a")) for _ in range(300))
    assert wrong / 300 <= 0.08


def test_both_timings_count_as_one() -> None:
    both = pooled(fake_both(1.0), fake_both(3.0))
    assert both.seconds == {"a": (1.0, 3.0), "b": (2.0, 6.0)} and both.rounds == 2


def fake_both(factor: float) -> Timing:
    return Timing(
        warmup_steps=1,
        steps_in_a_turn=1,
        seconds={"a": (factor,), "b": (2 * factor,)},
        state_bytes={},
        saved_bytes={},
        environment={},
    )


@pytest.fixture(scope="module")
def ran(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Runs at several budgets of the control; read them only, and analyse them with any second timing."""
    folder = tmp_path_factory.mktemp("ran")
    study = StudyConfig.from_data({**tiny_study(corpus), "budget": BUDGET_MULTIPLES})
    trainer = FakeTrainer(study, folder / "study", folder / "script.json")
    trainer.spread(local=-0.01)
    return trainer, trainer.run()


def analysed(ran: Ran, after: Timing | None, **decision: Any) -> ReportData:
    trainer, records = ran
    study = trainer.study.replace(decision={"smallest_effect": 0.05, **decision})
    return analyse(study, trainer.plan, records, trainer.baselines, timing_after=after)


def shifted(trainer: FakeTrainer, arm: str, factor: float) -> Timing:
    timing = trainer.plan.timing
    assert timing is not None
    return timing.replace(seconds={**timing.seconds, arm: tuple(factor * one for one in timing.seconds[arm])})


def test_timings_that_disagree_leave_no_verdict_at_equal_seconds(ran: Ran) -> None:
    report = analysed(ran, shifted(ran[0], "local", 1.1))
    assert report.timing is not None and report.timing.agree is False
    assert report.timing.sentence == (
        "seconds before and after the runs disagree by more than their error: local by a factor of 1.100"
    )
    for arm in ("delta", "local"):
        charged = report.arms[arm].charged
        assert charged["seconds"].comparison is not None and charged["seconds"].comparison.verdict is None
        assert charged["seconds"].unavailable == report.timing.sentence
        assert charged["flops"].comparison is not None and charged["flops"].comparison.verdict
        assert "seconds" not in report.arms[arm].speedup and "flops" in report.arms[arm].speedup
    assert not any("equal seconds" in finding for finding in report.findings)


def test_timings_that_agree_are_used_together(ran: Ran) -> None:
    report = analysed(ran, shifted(ran[0], "plain", 1.0))
    assert report.timing is not None and report.timing.agree and report.timing.seconds_after == report.timing.seconds
    one = report.arms["local"].charged["seconds"].comparison
    assert one is not None and one.verdict and "seconds" in report.arms["local"].speedup
    assert any("At equal seconds" in finding for finding in report.findings)


def test_one_timing_is_not_enough(ran: Ran) -> None:
    report = analysed(ran, None)
    assert report.timing is not None and report.timing.agree is None
    assert "before the runs only" in report.arms["local"].charged["seconds"].unavailable
    report = analysed(ran, shifted(ran[0], "plain", 1.0).replace(environment={"threads": 8}))
    assert report.timing is not None and "different machines" in report.timing.sentence
    twice = analysed(ran, shifted(ran[0], "local", 100.0).replace(environment={"threads": 8}))
    assert twice.arms["local"].step_seconds == report.arms["local"].step_seconds, "seconds that no machine takes"


def test_a_design_decided_by_seconds_has_no_verdict_then(ran: Ran) -> None:
    report = analysed(ran, shifted(ran[0], "local", 1.1), charge="seconds")
    assert report.arms["local"].verdict is None and report.arms["local"].no_verdict.startswith("seconds before and after")
    assert report.answer.startswith("No verdict")


def test_seconds_are_measured_again_once_all_runs_have_ended(trainer: FakeTrainer) -> None:
    folder = StudyFolder(trainer.folder)
    trainer.spread()
    trainer.actions["delta/1"] = ["kill"]
    trainer.run()
    first = folder.plan.timing
    assert first is not None and folder.timing_after == first, "the run that was killed may never end"
    marked = first.replace(warmup_steps=7)
    folder.keep_timing_after(marked)
    trainer.run()
    assert folder.timing_after == first == folder.timing_before, "again, since a run has been made"
    folder.keep_timing_after(marked)
    trainer.run()
    assert folder.timing_after == marked, "once"
    report = read_study_folder(trainer.folder)
    assert report.timing is not None and report.timing.agree


def test_a_run_that_fails_for_ever_does_not_put_off_the_second_timing(trainer: FakeTrainer) -> None:
    trainer.spread(local=-0.1)
    trainer.actions["delta/1"] = ["bad input", "bad input"]
    records = trainer.run()
    assert StudyFolder(trainer.folder).timing_after is not None
    assert {record.status for record in records.values()} == {"finished", "failed"}
    trainer.run()
    assert trainer.order.count("delta/1") == 2, "a failed run is tried again"


def test_a_study_that_moves_is_timed_on_the_machine_where_it_ends(trainer: FakeTrainer) -> None:
    """Only ratios of one machine are compared; what was matched by the plan's seconds stays."""
    folder = StudyFolder(trainer.folder)
    trainer.spread()
    trainer.actions["delta/1"] = ["kill"]
    trainer.run()
    plan = folder.plan
    assert plan.timing is not None
    elsewhere = plan.timing.replace(environment={**plan.timing.environment, "platform": "elsewhere"})
    folder.keep_plan(plan.replace(timing=elsewhere))
    trainer.run()
    assert folder.plan.timing == elsewhere and folder.timing_before == plan.timing == folder.timing_after
    report = read_study_folder(trainer.folder)
    assert report.timing is not None and report.timing.agree and report.timing.environment == plan.timing.environment


def test_a_study_timed_on_two_machines_can_be_timed_again(trainer: FakeTrainer) -> None:
    folder = StudyFolder(trainer.folder)
    trainer.spread()
    trainer.run()
    first = folder.timing_before
    assert first is not None and not measure_again(folder, fake_timer)
    folder.keep_timing_after(first.replace(environment={**first.environment, "device_name": "another"}))
    report = read_study_folder(trainer.folder)
    assert report.timing is not None and report.timing.agree is False and "run the study again" in report.timing.sentence
    last = folder.timing_after
    assert measure_again(folder, fake_timer) and folder.timing_before == last and folder.timing_after == first
    assert measure_again(folder, fake_timer) and folder.timing_before == first == folder.timing_after
    assert not measure_again(folder, fake_timer), "both are of one machine"
