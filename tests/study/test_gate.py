"""No verdict without a trained control, nor on an arm that fell behind the control it began as; and what is said instead."""

import math
from pathlib import Path
from typing import Any

import pytest

from twoaxis.model import DecoderConfig
from twoaxis.study import StudyConfig
from twoaxis.study.report import read_study_folder
from twoaxis.study.report.text_tables import RESULT_COLUMNS, rate_rows, result_rows
from twoaxis.study.report.validity import equals_at_start, judge
from twoaxis.study.report_data import ReportData
from twoaxis.study.running.baselines import Baselines, SeedBaselines, measure_baselines
from twoaxis.study.running.study_folder import StudyFolder
from twoaxis.train.recipe import TrainConfig

from .scripted import FakeTrainer

TEXT = SeedBaselines(unigram=6.0, bigram=4.4, trigram=3.9, counted=200_000)
ANSWERS = SeedBaselines(chance=math.log(26), majority=0.05, in_context=math.log(2), counted=20_000)
RECIPE = TrainConfig(model={"d_model": 16, "n_layers": 1})


def judged(one: SeedBaselines, losses: dict[int, float], accuracies: dict[int, float] | None = None, planned: int = 2) -> Any:
    return judge(
        Baselines(by_seed=dict.fromkeys(losses, one)), {"control": losses}, "control", accuracies or {}, planned, {}, RECIPE
    )


def test_a_control_below_the_bigram_passes() -> None:
    gate = judged(TEXT, {0: 4.05, 1: 3.95})
    assert gate.passed and gate.sentence == "Control 4.00 nats, below the bigram 4.40 and above the trigram 3.90."
    assert (gate.control, gate.bigram, gate.reasons, gate.change) == (pytest.approx(4.0), 4.4, (), "")
    assert judged(TEXT, {0: 3.7}, planned=1).sentence == "Control 3.70 nats, below the bigram 4.40 and below the trigram 3.90."
    close = judged(TEXT, {0: 4.3999}, planned=1)
    assert close.passed and "below the bigram 4.4000" in close.sentence, "equal to two digits"


def test_a_control_above_the_bigram_fails_and_the_report_says_what_to_change() -> None:
    gate = judged(TEXT, {0: 5.4, 1: 5.38})
    assert gate.passed is False
    assert gate.sentence == "Control 5.39 nats, above the bigram 4.40 and above the trigram 3.90: not trained."
    assert gate.reasons == ("the control does not beat the bigram counted in its own training tokens in 2 of 2 replicates",)
    for what in ("learning rate (now 0.001", "budget (now 4.10 M tokens)", "scale of the embedding", "warm-up (now 50 steps)"):
        assert what in gate.change


def test_one_replicate_above_the_bigram_is_enough() -> None:
    gate = judged(TEXT, {0: 3.9, 1: 4.5})
    assert gate.passed is False and "but not in every replicate (seeds 1 fail)" in gate.sentence


def test_answers_have_their_own_gate() -> None:
    gate = judged(ANSWERS, {0: 1.5, 1: 1.6}, {0: 0.6, 1: 0.62})
    assert gate.passed and gate.bigram is None
    assert gate.sentence == (
        "Control 1.55 nats, below chance 3.26 and above a uniform guess among the answers in the sample 0.69; accuracy 61.0 % "
        "against 5.0 % for the majority."
    )
    assert judged(ANSWERS, {0: 1.5, 1: 3.3}, {0: 0.6, 1: 0.6}).passed is False, "a loss above chance"
    assert judged(ANSWERS, {0: 1.5, 1: 1.5}, {0: 0.6, 1: 0.05}).passed is False, "no more right than the majority"


def test_an_unknown_gate_says_why() -> None:
    gate = judge(Baselines(missing="no such corpus"), {"control": {0: 3.0}}, "control", {}, 1, {}, RECIPE)
    assert gate.passed is None and gate.sentence == "Gate not decided: no such corpus."
    assert (
        judge(Baselines(), {}, "control", {}, 1, {}, RECIPE).sentence == "Gate not decided: no run of the control has finished."
    )
    assert "So far 1 of 3 replicates." in judged(TEXT, {0: 3.0}, planned=3).sentence


SWA = {"kind": "short_swa", "n_heads": 1}
CANON = {"kind": "canon", "init": "zero"}


@pytest.mark.parametrize(
    ("changes", "equal"),
    [
        ({}, True),
        ({"depth": "residual_scalars"}, True),
        ({"depth": "deep_delta"}, False),
        ({"blocks": [[{**SWA, "output_init": "zero"}, "attention", "swiglu"]]}, True),
        ({"blocks": [[SWA, "attention", "swiglu"]]}, False),
        # Paid for by the feed-forward, so not the control at step 0.
        ({"blocks": [[{**SWA, "output_init": "zero"}, "attention", {"kind": "swiglu", "d_ff": 8}]]}, False),
        ({"blocks": [[{**SWA, "output_init": "zero"}, "attention", "swiglu"], ["attention", "swiglu"]]}, True),
        ({"n_layers": 3}, False),
        ({"d_model": 32}, False),
    ],
)
def test_what_equals_the_control_at_step_0(changes: dict[str, Any], equal: bool) -> None:
    attention = {"kind": "attention", "n_heads": 2}

    def built(data: dict[str, Any]) -> DecoderConfig:
        blocks = [[attention if part == "attention" else part for part in block] for block in data["blocks"]]
        return DecoderConfig.from_data({**data, "blocks": blocks})

    base: dict[str, Any] = {"vocab_size": 16, "d_model": 16, "n_layers": 2, "blocks": [["attention", "swiglu"]]}
    assert equals_at_start(built({**base, **changes}), built(base)) is equal


@pytest.fixture
def study(study_data: dict[str, Any]) -> StudyConfig:
    study_data["arms"] = {"plain": {}, "delta": {"model": {"depth": "deep_delta"}}, "scalars": ["model.depth=residual_scalars"]}
    study_data["contrasts"] = [{"arm": "delta", "against": "scalars", "why": "two scalars are cheaper"}]
    return StudyConfig.from_data(study_data)


def verdicts(report: ReportData) -> dict[str, str]:
    return {row[0]: row[RESULT_COLUMNS.index("verdict")] for row in result_rows(report)}


def test_a_study_of_a_trained_control_has_verdicts(trainer: FakeTrainer) -> None:
    trainer.spread(delta=-0.1, scalars=-0.02)
    report = trainer.analyse()
    assert report.gate is not None and report.gate.passed and report.gate.control == pytest.approx(5.3, abs=0.01)
    assert verdicts(report) == {"plain": "control", "delta": "better, family of 3", "scalars": "better, family of 3"}
    (contrast,) = report.contrasts
    assert contrast.comparison is not None and (contrast.comparison.verdict, contrast.comparison.family) == ("better", 3)
    assert contrast.matched == "flops" and contrast.why == "two scalars are cheaper"
    assert report.answer == ("At equal tokens the loss is lower for delta (\u22120.1 nats) and scalars (\u22120.02).")


def test_without_a_trained_control_nothing_has_a_verdict(trainer: FakeTrainer) -> None:
    trainer.bigram = 4.4
    trainer.spread(delta=-0.1, scalars=-0.02)
    report = trainer.analyse()
    assert report.gate is not None and report.gate.passed is False
    assert report.answer == ("No verdict: the control was not trained; at 5.30 nats it does not beat a count bigram (4.40).")
    assert len(report.answer.split()) <= 20 and report.findings == ()
    reason = "the control was not trained: no verdict"
    assert verdicts(report) == {"plain": "control", "delta": reason, "scalars": reason}
    for arm in ("delta", "scalars"):
        for found in report.arms[arm].charged.values():
            assert found.comparison is None or found.comparison.verdict is None
        assert f"{arm}: no verdict, the control was not trained" in report.arms[arm].sentence
    assert report.contrasts[0].comparison is not None and report.contrasts[0].comparison.verdict is None
    assert report.contrasts[0].no_verdict == "the control was not trained"


def test_a_control_that_fails_once_is_not_said_to_fail_on_average(trainer: FakeTrainer) -> None:
    trainer.spread(delta=-0.1)
    trainer.bigram = 5.5
    report = trainer.analyse()
    gate = report.gate
    assert gate is not None and gate.passed is False and gate.control is not None and gate.control < 5.5
    assert report.answer.endswith("it does not beat a count bigram in every replicate.")


def test_an_arm_that_fell_behind_the_control_it_began_as_is_not_trained(trainer: FakeTrainer) -> None:
    trainer.spread(delta=+0.1, scalars=+0.1)
    report = trainer.analyse()
    assert report.gate is not None and report.gate.passed and report.gate.not_trained == ("scalars",)
    # Deep Delta Learning never equals the control, so it may be worse.
    assert verdicts(report) == {"plain": "control", "delta": "worse, family of 3", "scalars": "not trained: no verdict"}
    assert report.gate.reasons[0].startswith("scalars equals the control at step 0 and ends worse in all 3 replicates, by 0.1")
    assert report.gate.change.startswith("Change the learning rate")
    assert report.contrasts[0].no_verdict == "scalars: not trained"


def test_an_arm_that_fails_the_gate_of_the_control_has_no_verdict(trainer: FakeTrainer) -> None:
    """A loss far above the control's says how an arm was trained, not what it can do, when a table of counts is better."""
    trainer.spread(delta=+0.01, scalars=-0.1)
    trainer.bigram = max(loss for run, loss in trainer.losses.items() if run.startswith("plain/")) + 0.05
    trainer.losses["delta/1"] = trainer.bigram
    report = trainer.analyse()
    assert report.gate is not None and report.gate.passed and report.gate.not_trained == ("delta",)
    assert report.arms["delta"].no_verdict == "not trained"
    assert report.gate.reasons[0].startswith("delta does not beat the control's bigram in 1 of 3 replicates and ends at ")
    assert report.arms["scalars"].verdict == "better"


def test_an_arm_that_is_better_once_was_trained(trainer: FakeTrainer) -> None:
    trainer.spread(delta=-0.1, scalars=+0.1)
    trainer.losses["scalars/1"] = trainer.losses["plain/1"] - 0.01
    report = trainer.analyse()
    assert report.gate is not None and report.gate.not_trained == ()
    assert report.arms["scalars"].verdict == "undecided"


def test_an_unfinished_study_says_how_far_it_is(trainer: FakeTrainer) -> None:
    trainer.spread(delta=-0.1, scalars=-0.02)
    records = trainer.run()
    gone = {
        key: record.__class__(key, "not started", "not started", None, (), {}, {}, {}, {})
        for key, record in records.items()
        if key.seed == 2
    }
    report = trainer.analyse({**records, **gone})
    assert not report.complete and report.answer == "No verdict yet: 2 of 3 replicates have finished so far."
    assert report.arms["delta"].no_verdict == "2 of 3 replicates so far"
    differences = [trainer.losses[f"delta/{seed}"] - trainer.losses[f"plain/{seed}"] for seed in (0, 1)]
    assert all(f"\u2212{abs(one):.4f}" in report.arms["delta"].sentence for one in differences)
    assert report.gate is not None and "So far 2 of 3 replicates." in report.gate.sentence


def test_baselines_are_those_of_the_tokens_that_the_runs_read(study: StudyConfig) -> None:
    recipes = {seed: study.recipe("plain", seed) for seed in (0, 1)}
    found = measure_baselines(recipes, {})
    assert not found.missing and set(found.by_seed) == {0, 1}
    one = found.by_seed[0]
    assert one.unigram is not None and one.bigram is not None and one.trigram is not None
    assert one.unigram > one.bigram > one.trigram > 0 and one.chance is None
    assert one.counted == 6 * 4 * 16, "6 steps of 4 windows of 16 tokens, in one document"
    assert Baselines.from_data(found.to_data()) == found
    longer = measure_baselines({0: recipes[0].replace(steps=60)}, {}).by_seed[0]
    assert longer.bigram is not None and longer.bigram < one.bigram and longer.counted > one.counted


def test_other_tokens_are_no_baseline(study: StudyConfig) -> None:
    recorded = {0: {"train": {"fingerprint": "other"}, "validation": {"fingerprint": "other"}}}
    found = measure_baselines({0: study.recipe("plain", 0)}, recorded)
    assert found.by_seed == {} and "train tokens here are not those that the run of seed 0 has read" in found.missing


def test_a_folder_keeps_its_baselines(trainer: FakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer.spread(delta=-0.1)
    trainer.run()
    (trainer.folder / "baselines.json").unlink()
    calls: list[Any] = []

    def measured(recipes: dict[int, TrainConfig], recorded: dict[int, Any]) -> Baselines:
        calls.append((set(recipes), recorded[0]["train"]["fingerprint"]))
        return trainer.baselines

    monkeypatch.setattr("twoaxis.study.report.measure_baselines", measured)
    first, second = read_study_folder(trainer.folder), read_study_folder(trainer.folder)
    assert calls == [({0, 1, 2}, "f")], "measured once"
    assert first.gate == second.gate and first.gate is not None and first.gate.passed
    assert StudyFolder(trainer.folder).baselines == trainer.baselines


def test_baselines_that_cannot_be_measured_withhold_verdicts(trainer: FakeTrainer, tmp_path: Path) -> None:
    trainer.spread(delta=-0.1)
    trainer.run()
    (trainer.folder / "baselines.json").unlink()
    report = read_study_folder(trainer.folder)
    # The scripted runs recorded other tokens than those of the corpus.
    assert report.gate is not None and report.gate.passed is None
    assert "train tokens here are not those" in report.gate.sentence
    assert report.arms["delta"].no_verdict == "whether the control was trained is not known"
    assert report.answer == "No verdict: whether the control was trained is not known."
    assert not (trainer.folder / "baselines.json").exists()


def test_optimiser_groups_are_listed_where_an_arm_differs(trainer: FakeTrainer) -> None:
    report = trainer.analyse()
    rows = [row[:4] for row in rate_rows(report)]
    assert ["plain", "matrix", "0.001", "0.1"] in rows
    assert ["scalars", "mixing", "0.001", "0"] in rows
    assert not any(row[:2] == ["scalars", "matrix"] for row in rows)


def test_an_arm_that_takes_fewer_steps_may_be_worse(study_data: dict[str, Any], trainer: FakeTrainer) -> None:
    """It equals the control at step 0, and cannot reach it with the FLOPs that it is given."""
    base = {**study_data["base"], "schedule": {"kind": "constant", "warmup_steps": 0}}
    blocks = [[{"kind": "short_swa", "output_init": "zero"}, "attention", "swiglu"]]
    arms = {"plain": {}, "local": {"model": {"blocks": blocks}}}
    trainer.study = StudyConfig.from_data(
        {**study_data, "base": base, "arms": arms, "contrasts": [], "match": "flops", "budget": {"steps": 400}}
    )
    trainer.spread(local=0.3)
    report = trainer.analyse()
    assert report.arms["local"].steps < 400 and report.gate is not None and report.gate.not_trained == ()
    assert "not trained" not in report.arms["local"].sentence
