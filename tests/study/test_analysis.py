"""What is concluded, and what is not: incomplete arms and broken pairs get no verdict."""

import pytest

from twoaxis.study import words
from twoaxis.study.analysis import Analysis, analyse
from twoaxis.study.folder import RunRecord
from twoaxis.study.statistics import paired_test
from twoaxis.study.table import RESULT_COLUMNS, result_rows, run_rows
from twoaxis.study.verdicts import limits, pairing_sentence, verdict_sentence

from .scripted import FakeTrainer


def _analysis(trainer: FakeTrainer) -> Analysis:
    return analyse(trainer.study, trainer.run())


def _row(analysis: Analysis, arm: str) -> dict[str, str]:
    row = next(row for row in result_rows(analysis) if row[0] == arm)
    return dict(zip(RESULT_COLUMNS, row, strict=True))


def test_pairs_are_what_is_compared(trainer: FakeTrainer) -> None:
    trainer.spread(delta=-0.1, local=+0.2)
    analysis = _analysis(trainer)
    arms = {arm.name: arm for arm in analysis.arms}
    expected = paired_test([trainer.losses[f"delta/{seed}"] - trainer.losses[f"plain/{seed}"] for seed in (0, 1, 2)])
    assert arms["delta"].comparison is not None and arms["delta"].comparison.test == expected
    assert arms["delta"].comparison.verdict == "better"
    assert arms["local"].comparison is not None and arms["local"].comparison.verdict == "worse"
    assert arms["plain"].comparison is None
    assert analysis.complete
    assert verdict_sentence(analysis, arms["delta"]).startswith("delta: better than plain, its validation loss is lower")
    assert _row(analysis, "plain")["verdict"] == "control"
    assert _row(analysis, "plain")["tokens/s to control"] == words.ratio(1.0)


def test_ratios_and_costs(trainer: FakeTrainer) -> None:
    arms = {arm.name: arm for arm in _analysis(trainer).arms}
    assert arms["delta"].parameters == 1005
    assert arms["delta"].training_flops_per_token == 6005.0
    assert arms["delta"].tokens_per_second_ratio == pytest.approx(1.0)
    assert arms["local"].peak_memory_ratio == pytest.approx((2**28 + 5) / (2**28 + 5))


def test_an_undecided_arm_says_what_would_decide(trainer: FakeTrainer) -> None:
    trainer.losses |= {"plain/0": 5.0, "plain/1": 5.1, "plain/2": 5.2, "delta/0": 5.1, "delta/1": 5.0, "delta/2": 5.25}
    analysis = _analysis(trainer)
    delta = next(arm for arm in analysis.arms if arm.name == "delta")
    assert delta.comparison is not None and delta.comparison.verdict == "undecided"
    sentence = verdict_sentence(analysis, delta)
    assert f"About {delta.comparison.replicates_needed} replicates would find" in sentence
    assert delta.comparison.replicates_needed is not None and delta.comparison.replicates_needed > 3


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
        assert row["difference"] == row["95 % interval"] == "—"
    assert _row(analysis, failing.split("/")[0])["validation loss, nats/token"] == "—"
    assert _row(analysis, "local")["difference"] != "—" or "local" in verdicts


def test_an_arm_without_result_still_counts_in_the_correction(trainer: FakeTrainer) -> None:
    trainer.spread(delta=-0.1)
    records = trainer.run()
    gone = {place: RunRecord(place, "failed", "gone", None, (), {}, {}, {}, {}) for place in records if place.arm == "local"}
    after = next(arm for arm in analyse(trainer.study, records | gone).arms if arm.name == "delta").comparison
    assert after is not None
    assert after.p_holm == pytest.approx(2 * after.test.p)


def test_diverged_runs_are_named(trainer: FakeTrainer) -> None:
    trainer.actions["delta/2"] = ["diverge"]
    analysis = _analysis(trainer)
    assert _row(analysis, "delta")["verdict"] == "2 of 3 replicates (diverged): no verdict"
    assert any(row[2] == "diverged: diverged at step 3: loss nan" for row in run_rows(analysis))


def test_pairs_are_verified_from_what_runs_recorded(trainer: FakeTrainer) -> None:
    analysis = _analysis(trainer)
    assert len(analysis.pairs) == 6
    assert all(pair.shared == pair.equal > 5 and not pair.problems for pair in analysis.pairs)
    assert pairing_sentence(analysis).startswith("Verified for all 6 pairs")


@pytest.mark.parametrize(
    ("action", "words"),
    [("other start", "shared parameters start at other values"), ("other data", "other tokens than the control's: corpus")],
)
def test_broken_pairs_are_an_error(trainer: FakeTrainer, action: str, words: str) -> None:
    trainer.spread(delta=-0.1, local=-0.1)
    trainer.actions["delta/1"] = [action]
    analysis = _analysis(trainer)
    assert not analysis.complete
    sentence = pairing_sentence(analysis)
    assert sentence.startswith("ERROR: the pairing is broken") and words in sentence and "delta seed 1" in sentence
    assert _row(analysis, "delta")["verdict"] == "not paired with the control: no verdict"
    assert _row(analysis, "local")["verdict"] == "better"


def test_other_environments_are_a_limit(trainer: FakeTrainer) -> None:
    records = trainer.run()
    assert not any("Environment" in limit for limit in limits(analyse(trainer.study, records)))
    first = next(iter(records.values()))
    first.environment["threads"] = 2
    assert "threads differ" in limits(analyse(trainer.study, records))[-1]
