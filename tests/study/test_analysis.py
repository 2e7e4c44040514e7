"""What is concluded, and what is not: incomplete arms and broken pairs get no verdict."""

import json
from typing import Any

import pytest

from twoaxis.core.errors import StudyError
from twoaxis.display import numbers as words
from twoaxis.statistics import paired_test
from twoaxis.study import StudyConfig
from twoaxis.study.page.head import problems
from twoaxis.study.report import read_study_folder
from twoaxis.study.report.answer import COMPLETE, outlook
from twoaxis.study.report.text_tables import COST_COLUMNS, RESULT_COLUMNS, cost_rows, result_rows
from twoaxis.study.report_data import ReportData
from twoaxis.study.running.study_folder import RunRecord

from .scripted import FakeTrainer


def _analysis(trainer: FakeTrainer) -> ReportData:
    return trainer.analyse()


def _row(analysis: ReportData, arm: str) -> dict[str, str]:
    row = next(row for row in result_rows(analysis) if row[0] == arm)
    return dict(zip(RESULT_COLUMNS, row, strict=True))


def test_pairs_are_what_is_compared(trainer: FakeTrainer) -> None:
    trainer.spread(delta=-0.1, local=+0.2)
    analysis = _analysis(trainer)
    arms = analysis.arms
    expected = paired_test([trainer.losses[f"delta/{seed}"] - trainer.losses[f"plain/{seed}"] for seed in (0, 1, 2)])
    found = arms["delta"].charged["tokens"].comparison
    assert found is not None and found.paired_differences == expected.differences
    assert found.ci95 == (expected.low, expected.high) and found.bootstrap95 == expected.bootstrap
    assert found.family == 2 and found.simultaneous is not None and found.simultaneous[0] < expected.low
    assert (arms["delta"].verdict, arms["local"].verdict, arms["plain"].verdict) == ("better", "worse", None)
    assert analysis.complete and analysis.control == "plain"
    assert arms["delta"].sentence.startswith("delta: better than plain, its validation loss is lower (at equal tokens, mean")
    assert analysis.answer == "At equal tokens the loss is lower for delta (\u22120.1 nats), higher for local (+0.2)."
    assert analysis.findings[0].startswith("At equal tokens, the validation loss is lower for delta (")
    assert "higher for local (" in analysis.findings[0]
    assert _row(analysis, "plain")["verdict"] == "control"
    assert _row(analysis, "delta")["verdict"] == "better, family of 2"
    costs = {row[0]: dict(zip(COST_COLUMNS, row, strict=True)) for row in cost_rows(analysis)}
    assert costs["plain"]["seconds to control"] == words.ratio(1.0)


def test_an_answer_without_a_better_arm_says_so_first(trainer: FakeTrainer) -> None:
    trainer.spread(delta=+0.1, local=+0.2)
    answer = _analysis(trainer).answer
    assert answer == "At equal tokens, no arm is shown to lower the loss; 2 raise it, most local (+0.2 nats)."


def test_ratios_and_costs(trainer: FakeTrainer) -> None:
    analysis, plan = _analysis(trainer), trainer.plan
    delta = analysis.arms["delta"]
    assert delta.parameters == plan.arm("delta").parameters
    assert delta.training_flops == delta.tokens * (delta.training_flops_per_token or 0)
    # The machine of the timer becomes slower, and the ratio of each round is that of the FLOPs all the same.
    assert delta.step_seconds_ratio == pytest.approx(
        plan.arm("delta").training_flops_per_token / plan.control.training_flops_per_token
    )
    assert delta.tokens_per_second_ratio == pytest.approx(1.0)
    assert analysis.arms["local"].peak_memory_ratio == pytest.approx((2**28 + 5) / (2**28 + 5))
    assert delta.predicted_memory_bytes == 1100


def test_an_undecided_arm_says_what_would_decide(trainer: FakeTrainer) -> None:
    trainer.losses |= {"plain/0": 5.0, "plain/1": 5.1, "plain/2": 5.2, "delta/0": 5.1, "delta/1": 5.0, "delta/2": 5.25}
    delta = _analysis(trainer).arms["delta"]
    found = delta.charged["tokens"].comparison
    assert found is not None and delta.verdict == "undecided"
    assert f"About {found.replicates_needed} replicates would find" in delta.sentence
    assert found.replicates_needed is not None and found.replicates_needed > 3


@pytest.mark.parametrize(
    ("failing", "verdicts"),
    [
        ("delta/1", {"delta": "2 of 3 replicates (failed): no verdict"}),
        (
            "plain/1",
            {
                "delta": "control has 2 of 3 replicates (failed): no verdict",
                "local": "control has 2 of 3 replicates (failed): no verdict",
                "plain": "control, 2 of 3 replicates",
            },
        ),
    ],
)
def test_incomplete_arms_get_no_numbers(trainer: FakeTrainer, failing: str, verdicts: dict[str, str]) -> None:
    trainer.spread(delta=-0.1, local=0.1)
    trainer.actions[failing] = ["kill"]
    analysis = _analysis(trainer)
    assert not analysis.complete
    for arm, verdict in verdicts.items():
        row = _row(analysis, arm)
        assert row["verdict"] == verdict
        assert row["difference"] == row["simultaneous interval"] == row["own 95 % interval"] == "—"
    assert _row(analysis, failing.split("/")[0])["validation loss, nats/token"] == "—"
    assert _row(analysis, "local")["difference"] != "—" or "local" in verdicts


def test_an_arm_without_result_still_counts_in_the_correction(trainer: FakeTrainer) -> None:
    trainer.spread(delta=-0.1)
    records = trainer.run()
    gone = {key: RunRecord(key, "failed", "gone", None, (), {}, {}, {}, {}) for key in records if key.arm == "local"}
    after = trainer.analyse({**records, **gone}).arms["delta"].charged["tokens"].comparison
    assert after is not None
    assert after.p_holm == pytest.approx(2 * after.p)


def test_diverged_runs_are_named(trainer: FakeTrainer) -> None:
    trainer.actions["delta/2"] = ["diverge"]
    analysis = _analysis(trainer)
    assert _row(analysis, "delta")["verdict"] == "2 of 3 replicates (diverged): no verdict"
    assert any((run.status, run.message) == ("diverged", "diverged at step 3: loss nan") for run in analysis.runs)


def test_a_diverged_arm_leaves_nothing_to_run_and_is_not_decided(trainer: FakeTrainer) -> None:
    trainer.spread(local=-0.1)
    trainer.actions["delta/2"] = ["diverge"]
    report = _analysis(trainer)
    assert not report.complete and report.arms["local"].verdict == "better"
    decide, steps = outlook(report)
    assert decide == "" and "Run the study again" not in steps
    assert steps.startswith("Try lower learning rates for delta, which diverged.")
    (said,) = problems(report)
    assert "8 of 9 runs have finished, 1 have diverged." in said and COMPLETE not in said


def test_arms_that_all_diverge_are_no_unfinished_study(trainer: FakeTrainer) -> None:
    for arm in ("delta", "local"):
        trainer.actions |= {f"{arm}/{seed}": ["diverge"] for seed in range(3)}
    report = _analysis(trainer)
    assert report.answer == "No verdict: 0 of 3 replicates (diverged)."


def test_a_small_effect_keeps_its_sign(trainer: FakeTrainer) -> None:
    trainer.study = trainer.study.replace(decision={"smallest_effect": 0.0001})
    trainer.spread()
    for seed in range(3):
        trainer.losses[f"local/{seed}"] = trainer.losses[f"plain/{seed}"] - 0.0004 - 0.000001 * seed
    assert "lower for local (\u22120.0004 nats)" in _analysis(trainer).answer


def test_pairs_are_verified_from_what_runs_recorded(trainer: FakeTrainer) -> None:
    pairing = _analysis(trainer).pairing
    assert len(pairing.pairs) == 6
    assert all(pair["shared_parameter_tensors"] == pair["equal_parameter_tensors"] > 5 for pair in pairing.pairs)
    assert pairing.verified and pairing.sentence.startswith("Verified for all 6 pairs")


@pytest.mark.parametrize(
    ("action", "words"),
    [("other start", "shared parameters start at other values"), ("other data", "other tokens than the control's: corpus")],
)
def test_broken_pairs_are_an_error(trainer: FakeTrainer, action: str, words: str) -> None:
    trainer.spread(delta=-0.1, local=-0.1)
    trainer.actions["delta/1"] = [action]
    analysis = _analysis(trainer)
    assert not analysis.complete and not analysis.pairing.verified
    sentence = analysis.pairing.sentence
    assert sentence.startswith("ERROR: the pairing is broken") and words in sentence and "delta seed 1" in sentence
    assert _row(analysis, "delta")["verdict"] == "not paired with the control: no verdict"
    assert _row(analysis, "local")["verdict"] == "better, family of 2"


def test_other_environments_are_a_limit(trainer: FakeTrainer) -> None:
    records = trainer.run()
    assert not any("Environment" in limit for limit in trainer.analyse(records).limits)
    first = next(iter(records.values()))
    first.environment["threads"] = 2
    assert "threads differ" in trainer.analyse(records).limits[-1]


@pytest.mark.parametrize("key", ["delta/seed-1", "plain/seed-1"])
def test_a_run_of_another_recipe_than_the_plan_is_no_pair(finished: FakeTrainer, key: str) -> None:
    """For example one that `twoaxis train` has made longer."""
    path = finished.folder / "runs" / key / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"steps": 12}))
    report = read_study_folder(finished.folder)
    assert not report.complete and "another recipe than the plan's: steps is 12, not 6" in report.pairing.sentence
    assert report.arms["delta"].no_verdict == "not paired with the control"
    assert (report.arms["local"].verdict is None) is key.startswith("plain")


@pytest.mark.parametrize(("name", "content"), [("config", None), ("config", "{}"), ("result", "{}"), ("reused", "{}")])
def test_a_damaged_run_is_named(finished: FakeTrainer, name: str, content: str | None) -> None:
    path = finished.folder / "runs/delta/seed-1" / f"{name}.json"
    path.unlink(missing_ok=True) if content is None else path.write_text(content)
    with pytest.raises(StudyError, match=rf"delta seed 1: .*{name}\.json: cannot be read"):
        read_study_folder(finished.folder)


def test_an_answer_names_the_only_undecided_arm(trainer: FakeTrainer) -> None:
    trainer.spread()
    trainer.actions["delta/1"] = ["kill"]
    found = "At equal tokens, no arm differs detectably from plain: local undecided with 3 replicates; 1 without verdict."
    assert _analysis(trainer).answer == found


def test_an_answer_of_contrasts_alone(study_data: dict[str, Any], trainer: FakeTrainer) -> None:
    """At equal FLOPs no arm of this design has a verdict, while two arms cost the same."""
    study_data["contrasts"] = [{"arm": "delta", "against": "other"}]
    study_data["arms"]["other"] = {"model": {"depth": {"kind": "deep_delta", "value_target": "code"}}}
    trainer.study = StudyConfig.from_data(study_data | {"decision": {"smallest_effect": 0.05, "charge": "flops"}})
    trainer.spread(delta=-0.1)
    assert _analysis(trainer).answer == "No verdict on any arm against plain; 1 of 1 contrasts between arms have one."
