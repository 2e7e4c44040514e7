"""Evidence is read from the reports that ship with the package, turned the right way round, and never from withdrawn ones."""

from pathlib import Path
from typing import Any

import pytest

from twoaxis.cli.plan_tables import print_evidence
from twoaxis.core.kept_reports import KeptReport, kept_reports
from twoaxis.planner.evidence import NO_VALID_STUDY, evidence, local_mixers
from twoaxis.planner.methods import Goal

GATE = {"passed": True, "sentence": "The control reaches 3.71 nats, below the bigram 4.16."}
PLAIN = {"depth": {"kind": "residual"}, "mixers": {"attention": 2, "swiglu": 2}}
DELTA = {"delta": {"depth": {"kind": "deep_delta", "update_rule": "delta", "value_target": "paper"}}}
LOCAL = {"mixers": {"short_swa": 2, **PLAIN["mixers"]}}


def comparison(verdict: str, difference: float) -> dict[str, Any]:
    return {
        "paired_differences": [difference, difference],
        "mean_difference": difference,
        "ci95": [difference - 0.5, difference + 0.25],
        "verdict": verdict,
    }


def report(arms: dict[str, Any], verdicts: dict[str, str], contrasts: Any = (), **changes: Any) -> KeptReport:
    """A report with a difference of -1 for what is better, +1 for what is worse and 0 for what is undecided."""
    size = {"better": -1.0, "worse": 1.0, "undecided": 0.0}
    data = {"control": {"control": True, "role": "control", "parameters": 1_000_000, "tokens": 2_000_000, **PLAIN}}
    for name, mixers in arms.items():
        role = "companion" if "~" in name else "treatment"
        data[name] = {"control": False, "role": role, "parameters": 1_250_000, "tokens": 2_000_000, **PLAIN, **mixers}
        if name in verdicts:
            data[name]["charged"] = {"tokens": {"comparison": comparison(verdicts[name], size[verdicts[name]])}}
    said = [
        {"arm": arm, "against": against, "matched": "flops", "comparison": comparison(verdict, size[verdict])}
        for arm, against, verdict in contrasts
    ]
    found = {"question": "Which?", "complete": True, "charge": "tokens", "gate": GATE, "arms": data}
    return KeptReport("made_up", "current", "made_up.json", found | {"contrasts": said} | changes)


@pytest.mark.parametrize(
    ("verdict", "contrast", "side"),
    [
        ("better", "better", "for"),
        ("better", "undecided", "for"),
        ("better", "worse", "mixed"),
        ("worse", "better", "against"),
        ("undecided", "better", "undecided"),
        ("undecided", "worse", "undecided"),
    ],
)
def test_the_comparison_with_the_control_chooses_the_side(verdict: str, contrast: str, side: str) -> None:
    arms = {**DELTA, "delta~write_only": {"depth": {"kind": "deep_delta", "update_rule": "write_only"}}}
    (study,) = evidence("shortcut", (report(arms, {"delta": verdict}, [("delta", "delta~write_only", contrast)]),))
    assert study.side == side and not study.withdrawn
    assert [pair.against for pair in study.pairs] == ["control", "delta~write_only"]
    assert study.scale == "models of 1 M to 1.25 M parameters, 2 M tokens a run"


def test_a_comparison_says_its_verdict_difference_interval_and_number() -> None:
    (study,) = evidence("shortcut", (report(DELTA, {"delta": "better"}),))
    said = "delta is better than control at equal tokens: -1.0000 nats per token, own 95 % interval -1.5000 to -0.7500"
    assert study.pairs[0].sentence.replace("\N{MINUS SIGN}", "-") == f"{said}, 2 replicates"


def test_the_interval_of_the_verdict_is_shown_where_the_report_has_it() -> None:
    kept = report(DELTA, {"delta": "better"})
    kept.report["arms"]["delta"]["charged"]["tokens"]["comparison"] |= {"simultaneous": [-2.0, -0.125], "family": 7}
    (study,) = evidence("shortcut", (kept,))
    (pair,) = study.pairs
    assert (pair.low, pair.high, pair.family) == (-2.0, -0.125, 7)
    assert "simultaneous 95 % interval (family of 7) \N{MINUS SIGN}2.0000 to" in pair.sentence


def test_another_form_of_the_method_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    released = {"kind": "deep_delta", "value_channels": 1, "value_target": "code"}
    found = evidence("shortcut", (report({**DELTA, "released": {"depth": released}}, {"delta": "better"}),))
    assert found[0].forms == ("released (value: 4 sigmoid(W_v x + b_v), along k)",)
    print_evidence(found)
    assert "Not the form of this plan: released (value" in capsys.readouterr().out


def test_a_withheld_verdict_is_none() -> None:
    kept = report(DELTA, {"delta": "better"})
    kept.report["arms"]["delta"]["charged"]["tokens"]["comparison"]["verdict"] = None
    (study,) = evidence("shortcut", (kept,))
    assert study.side == "undecided" and study.pairs[0].sentence == "delta against control: no verdict"


def test_a_generated_short_swa_is_evidence_on_it_turned_round() -> None:
    arms = {**DELTA, "delta~short_swa@flops": LOCAL}
    (study,) = evidence("local-mixing", (report(arms, {"delta": "better"}, [("delta", "delta~short_swa@flops", "better")]),))
    (pair,) = study.pairs
    assert (pair.arm, pair.against, pair.verdict) == ("delta~short_swa@flops", "delta", "worse")
    assert (pair.difference, pair.low, pair.high) == (1.0, 0.75, 1.5)
    assert study.side == "against"


@pytest.mark.parametrize(
    ("goal", "names"),
    [("shortcut", ["delta", "delta_cc"]), ("local-mixing", ["local"]), ("both", ["delta", "delta_cc", "local", "together"])],
)
def test_arms_are_recognised_by_what_they_change(goal: Goal, names: list[str]) -> None:
    arms = {
        **DELTA,
        "delta_cc": {"depth": {"kind": "deep_delta", "value_channels": 4, "compressor": "channel"}},
        "write_only": {"depth": {"kind": "deep_delta", "update_rule": "write_only"}},
        "local": LOCAL,
        "together": {**DELTA["delta"], **LOCAL},
        "scalars": {"depth": {"kind": "residual_scalars"}},
        "inside_attention": {"mixers": {**PLAIN["mixers"], "attention+canon": 2}},
        "wider": {},
    }
    (study,) = evidence(goal, (report(arms, dict.fromkeys(arms, "better")),))
    assert [pair.arm for pair in study.pairs] == names


def test_a_study_without_the_method_says_nothing_on_it() -> None:
    assert evidence("shortcut", (report({"local": LOCAL}, {"local": "better"}),)) == ()


def test_an_arm_without_runs_says_nothing() -> None:
    kept = report({**DELTA, "delta_cc": DELTA["delta"]}, {"delta": "better"}, complete=False)
    del kept.report["arms"]["delta_cc"]["depth"]
    (study,) = evidence("shortcut", (kept,))
    assert study.withdrawn == "runs are missing"
    del kept.report["arms"]["delta"]["depth"]
    assert evidence("shortcut", (kept,)) == ()


def test_an_arm_that_was_not_trained_has_no_verdict() -> None:
    kept = report(DELTA, {"delta": "worse"})
    kept.report["arms"]["delta"]["no_verdict"] = "not trained: try a lower rate"
    (study,) = evidence("shortcut", (kept,))
    assert study.side == "undecided" and "no verdict (not trained: try a lower rate)" in study.pairs[0].sentence


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"gate": {"passed": False, "sentence": "The control is above the bigram."}}, "The control is above the bigram."),
        ({"gate": {"passed": None, "sentence": "No baseline."}}, "No baseline."),
        ({"gate": None}, "no validity gate"),
        ({"complete": False}, "runs are missing"),
    ],
)
def test_what_did_not_pass_its_gate_is_named_as_withdrawn_and_never_as_evidence(
    changes: dict[str, Any], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (study,) = found = evidence("shortcut", (report(DELTA, {"delta": "better"}, **changes),))
    assert study.side == "withdrawn" and study.pairs == ()
    print_evidence(found)
    out = capsys.readouterr().out
    assert NO_VALID_STUDY in out and why in out and "better" not in out


def test_both_sides_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    many = [("delta", f"delta~static_weights@{index}", "undecided") for index in range(6)]
    kept = [report(DELTA, {"delta": "worse"}), report(DELTA, {"delta": "better"}, many)]
    print_evidence(evidence("shortcut", tuple(kept)))
    out = " ".join(capsys.readouterr().out.split())
    assert NO_VALID_STUDY not in out
    assert out.index("For it:") < out.index("delta is better") < out.index("Against it:") < out.index("delta is worse")
    assert "and 3 more comparisons: 3 undecided." in out and "below the bigram 4.16. Scale: models of 1 M" in out


def test_without_a_valid_study_the_plan_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    print_evidence(())
    assert NO_VALID_STUDY in " ".join(capsys.readouterr().out.split())


def test_every_kept_report_can_be_read_wherever_the_command_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for kept in kept_reports():
        assert all(arm["depth"]["kind"] and local_mixers(arm) for arm in kept.report["arms"].values())
    found: dict[Goal, set[str]] = {goal: {study.name for study in evidence(goal)} for goal in ("shortcut", "local-mixing")}
    assert "shortcut" in found["shortcut"] and "local_mixing" in found["local-mixing"]
