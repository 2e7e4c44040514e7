"""Claims that need training say each of their verdicts, and say it for the right reason."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from twoaxis.claims import Finding, select, studies
from twoaxis.claims.arm_difference import Arm as KeptArm
from twoaxis.claims.arm_difference import Difference, judge, paired, planned
from twoaxis.core import kept_reports
from twoaxis.core.kept_reports import KeptReport

Patch = pytest.MonkeyPatch
PASSED = {"passed": True, "sentence": "The control is below the bigram."}
SMALLEST = 0.02
PLAIN = {"attention": 2, "swiglu": 2}
SWA = {"short_swa": 2, **PLAIN}
GDN = {"gated_delta_net": 2, "swiglu": 2}


def arm(
    depth: str | Mapping[str, Any] = "residual", mixers: Mapping[str, int] = PLAIN, loss: float = 4.0, **rest: Any
) -> dict[str, Any]:
    """An arm of three seeds, whose losses differ from those of another arm by nearly the same each time."""
    losses = {str(seed): loss + 0.1 * seed + 0.001 * seed * (loss > 4) for seed in range(3)}
    depth = {"kind": depth} if isinstance(depth, str) else dict(depth)
    costs = {"parameters": 1000, "training_flops_per_token": 10_000.0}
    return {"role": "treatment", "control": False, "depth": depth, "mixers": dict(mixers), "losses": losses, **costs, **rest}


def against_control(verdict: str | None, mean: float, low: float, high: float) -> dict[str, Any]:
    comparison = {"mean_difference": mean, "ci95": [low, high], "paired_differences": [mean] * 3, "verdict": verdict}
    return {"verdict": verdict, "charged": {"tokens": {"comparison": comparison}}}


BETTER = against_control("better", -0.1, -0.15, -0.05)
NO_GAIN = against_control("undecided", 0.0, -0.01, 0.01)
WORSE = against_control("worse", 0.1, 0.05, 0.15)
OPEN = against_control("undecided", -0.1, -0.3, 0.1)
OUTCOMES = {"holds": BETTER, "does not hold at this scale": NO_GAIN, "undecided": OPEN}


def contrast(one: str, other: str, verdict: str, mean: float, low: float, high: float) -> dict[str, Any]:
    comparison = against_control(verdict, mean, low, high)["charged"]["tokens"]["comparison"]
    return {"arm": one, "against": other, "comparison": comparison}


def study(
    arms: Mapping[str, Any], contrasts: Sequence[Any] = (), name: str = "one", status: Any = "current", **changes: Any
) -> KeptReport:
    report = {
        "question": "q",
        "complete": True,
        "charge": "tokens",
        "gate": PASSED,
        "design": {"decision": {"smallest_effect": SMALLEST}},
        "arms": {"control": arm(role="control", control=True), **arms},
        "contrasts": list(contrasts),
    }
    return KeptReport(name, status, f"studies/results/{name}/report.json", report | changes)


def find(number: int, patch: Patch, *kept: KeptReport) -> Finding:
    patch.setattr(studies, "kept_reports", lambda: kept)
    (claim,) = select([number])
    return claim.find()


def outcomes(found: Finding) -> list[tuple[str, ...]]:
    assert found.table is not None
    return [cells[3:] for cells in found.table.rows]


def aggregation(outcome: Mapping[str, Any]) -> KeptReport:
    return study({"dense": arm("denseformer", **outcome), "scalars": arm("residual_scalars", **BETTER)})


def delta(outcome: Mapping[str, Any]) -> KeptReport:
    """Better than both controls; against the plain stream as given."""
    own: dict[str, Any] = {"kind": "deep_delta", "update_rule": "delta", "value_target": "paper"}
    arms = {
        "ddl": arm(own, **outcome),
        "ddl~write_only": arm(own | {"update_rule": "write_only"}, **BETTER, role="companion"),
        "scalars": arm("residual_scalars", **BETTER),
    }
    won = ("better", -0.1, -0.15, -0.05)
    return study(arms, [contrast("ddl", "ddl~write_only", *won), contrast("ddl", "scalars", *won)])


def numbers(outcome: Mapping[str, Any]) -> tuple[str, float, float, float]:
    comparison = outcome["charged"]["tokens"]["comparison"]
    return comparison["verdict"], comparison["mean_difference"], *comparison["ci95"]


def local(outcome: Mapping[str, Any]) -> KeptReport:
    arms = {
        "swa": arm(mixers=SWA),
        "conv": arm(mixers={"short_conv": 2, **PLAIN}),
        "canon": arm(mixers={"attention+canon": 2, **PLAIN}),
    }
    # Against Canon the study names the arms the other way round.
    verdict, mean, low, high = numbers(outcome)
    turned = {"better": "worse", "worse": "better"}.get(verdict, verdict), -mean, -high, -low
    return study(arms, [contrast("swa", "conv", *numbers(BETTER)), contrast("canon", "swa", *turned)])


def placed(outcome: Mapping[str, Any]) -> KeptReport:
    arms = {"swa": arm(mixers=SWA), "attnres": arm("attention_residuals")}
    return study(arms, [contrast("swa", "attnres", *numbers(outcome))])


def branches(outcome: Mapping[str, Any]) -> KeptReport:
    arms = {
        "conv": arm(mixers={"gated_delta_net+canon": 2, **GDN}),
        "swa": arm(mixers={"gated_delta_net+local_swa": 2, **GDN}),
    }
    return study(arms, [contrast("swa", "conv", *numbers(outcome))])


def tables(outcome: Mapping[str, Any]) -> KeptReport:
    arms = {"swa": arm(mixers=SWA, parameters=900), "table": arm(mixers={"attention+engram": 1, **PLAIN})}
    return study(arms, [contrast("swa", "table", *numbers(outcome))])


MAKERS = {13: aggregation, 14: delta, 15: local, 16: placed, 17: branches}
CASES = [(number, make, verdict) for number, make in MAKERS.items() for verdict in OUTCOMES]


@pytest.mark.parametrize(("number", "make", "verdict"), CASES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_each_claim_says_each_verdict(number: int, make: Any, verdict: str, monkeypatch: Patch) -> None:
    found = find(number, monkeypatch, make(OUTCOMES[verdict]))
    assert found.verdict == verdict, found
    assert found.negative == (verdict == "does not hold at this scale")
    assert ("in one" in found.bound) == (verdict == "holds")
    assert found.links == ("studies/results/one/report.json",)


@pytest.mark.parametrize("number", [*MAKERS, 18])
@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"status": "superseded"}, "superseded by a later design"),
        ({"gate": None}, "its report has no validity gate"),
        ({"gate": {"passed": False, "sentence": "The control is above the bigram."}}, "The control is above the bigram"),
        ({"complete": False}, "runs are missing"),
    ],
)
def test_a_study_that_does_not_count_is_shown_and_decides_nothing(
    number: int, changes: dict[str, Any], why: str, monkeypatch: Patch
) -> None:
    made = {**MAKERS, 18: tables}[number](BETTER)
    report = {**made.report, **{key: value for key, value in changes.items() if key != "status"}}
    withdrawn = KeptReport(made.name, changes.get("status", "current"), made.path, report)
    found = find(number, monkeypatch, withdrawn)
    assert found.verdict == "no study yet"
    assert f"one: {why}" in " ".join(found.evidence)
    assert found.table is not None and {row[1] for row in found.table.rows} == {"no"}


@pytest.mark.parametrize(
    ("outcome", "verdict"),
    [
        (BETTER, "holds"),
        (NO_GAIN, "holds"),
        (WORSE, "does not hold at this scale"),
        (OPEN, "undecided"),
    ],
    ids=["better", "as good", "worse", "open"],
)
def test_a_table_has_to_be_equalled_with_fewer_parameters(outcome: dict[str, Any], verdict: str, monkeypatch: Patch) -> None:
    assert find(18, monkeypatch, tables(outcome)).verdict == verdict


def test_a_larger_model_does_not_stand_in_for_a_table(monkeypatch: Patch) -> None:
    made = tables(BETTER)
    made.report["arms"]["swa"]["parameters"] = 1000
    found = find(18, monkeypatch, made)
    assert found.verdict == "undecided"
    assert found.table is not None and found.table.rows[0][3:] == ("not compared", "the arm has not fewer parameters")


@pytest.mark.parametrize("number", [13, 14, 15, 16, 17, 18])
def test_without_a_study_there_is_no_verdict(number: int, monkeypatch: Patch) -> None:
    found = find(number, monkeypatch)
    assert (found.verdict, found.table, found.links) == ("no study yet", None, ())


def test_the_sentence_is_existential_over_arms_and_studies(monkeypatch: Patch) -> None:
    mixed = study({"dense": arm("denseformer", **WORSE), "attnres": arm("attention_residuals", **BETTER)}, name="mixed")
    against = study({"dense": arm("denseformer", **WORSE)}, name="against")
    found = find(13, monkeypatch, against, mixed)
    assert found.sentence == "holds in mixed; against two scalars: not compared"
    assert find(13, monkeypatch, against).verdict == "does not hold at this scale"
    unclear = study({"dense": arm("denseformer", **OPEN)}, name="unclear")
    assert find(13, monkeypatch, against, unclear).verdict == "undecided"


def test_two_scalars_are_reported_and_decide_nothing_about_aggregation(monkeypatch: Patch) -> None:
    # The losses of both are those of `arm`, so that their difference is nothing.
    found = find(13, monkeypatch, aggregation(BETTER))
    assert found.sentence == "holds in one; against two scalars: no better"
    assert found.table is not None
    assert [row[2] for row in found.table.rows] == ["dense against control", "dense against scalars"]
    assert found.table.rows[1][4].endswith("n = 3, not planned")


def test_the_placement_has_to_win_against_every_read_over_depth(monkeypatch: Patch) -> None:
    arms = {"swa": arm(mixers=SWA), "attnres": arm("attention_residuals"), "dense": arm("denseformer")}
    pairs = [contrast("swa", "attnres", *numbers(BETTER)), contrast("swa", "dense", *numbers(OPEN))]
    assert find(16, monkeypatch, study(arms, pairs)).verdict == "undecided"
    second = study(
        {"swa": arm(mixers=SWA), "other": arm(mixers=SWA), "attnres": arm("attention_residuals")},
        [
            contrast("swa", "attnres", *numbers(BETTER)),
            contrast("other", "attnres", *numbers(OPEN)),
        ],
    )
    assert find(16, monkeypatch, second).verdict == "undecided"
    # Existential claims need one arm.
    assert find(13, monkeypatch, second).verdict != "holds"


@pytest.mark.parametrize("number", [15, 16])
def test_unequal_costs_are_not_compared(number: int, monkeypatch: Patch) -> None:
    made = MAKERS[number](BETTER)
    made.report["arms"]["swa"]["training_flops_per_token"] = 10_300.0
    found = find(number, monkeypatch, made)
    assert found.verdict == "undecided"
    assert found.table is not None and {row[3:] for row in found.table.rows} >= {("not compared", "not at equal FLOPs: 1.03 x")}
    made.report["arms"]["swa"]["training_flops_per_token"] = 10_150.0
    assert find(number, monkeypatch, made).verdict == "holds"


def test_deep_delta_needs_every_control(monkeypatch: Patch) -> None:
    made = delta(BETTER)
    del made.report["arms"]["scalars"]
    found = find(14, monkeypatch, made)
    assert found.verdict == "undecided"
    assert found.table is not None and "ddl against two scalars: no such arm" in [row[2] for row in found.table.rows]
    other = delta(BETTER)
    other.report["arms"]["ddl~write_only"]["depth"]["value_target"] = "code"
    assert find(14, monkeypatch, other).verdict == "undecided"


def test_a_companion_takes_part_in_its_own_comparison_only(monkeypatch: Patch) -> None:
    arms = {"attnres": arm("attention_residuals"), "dense": arm("denseformer")}
    arms["dense~short_swa@flops"] = arm(mixers=SWA, role="companion")
    made = study(arms, [contrast("dense", "dense~short_swa@flops", "worse", 0.1, 0.05, 0.15)])
    found = find(16, monkeypatch, made)
    assert found.verdict == "holds"
    assert found.table is not None and [row[2] for row in found.table.rows] == ["dense~short_swa@flops against dense"]


def test_arms_of_other_sublayers_are_no_rivals_along_depth(monkeypatch: Patch) -> None:
    made = study({"dense": arm("denseformer", mixers=SWA, **BETTER)})
    assert find(13, monkeypatch, made).verdict == "no study yet"


def test_damaged_reports_are_named_and_refute_nothing(monkeypatch: Patch) -> None:
    made = aggregation(BETTER)
    report = {key: value for key, value in made.report.items() if key != "design"}
    found = find(13, monkeypatch, KeptReport(made.name, made.status, made.path, report))
    assert found.verdict == "no study yet"
    assert "studies/results/one/report.json cannot be read (KeyError: 'design'); write it anew." in found.evidence


def test_a_missing_data_file_is_named(monkeypatch: Patch, tmp_path: Path) -> None:
    def missing() -> Any:
        return kept_reports.kept_reports(tmp_path / "none.json")

    monkeypatch.setattr(studies, "kept_reports", missing)
    (claim,) = select([13])
    found = claim.find()
    assert found.verdict == "no study yet"
    assert str(studies.KEPT) in found.evidence[0] and "FileNotFoundError" in found.evidence[0]


def test_unplanned_comparisons_are_corrected_for_their_number() -> None:
    one = KeptArm("one", {"losses": {"0": 3.9, "1": 3.91, "2": 3.87, "3": 5.0}})
    other = KeptArm("other", {"losses": {"0": 4.0, "1": 4.0, "2": 4.0}})
    alone, among = paired(one, other, 1), paired(one, other, 40)
    assert alone is not None and among is not None
    # Student's t with two degrees of freedom: 4.3027 times the standard error 0.0120185.
    assert (alone.low, alone.high) == pytest.approx((-0.1583783, -0.0549550), abs=1e-6)
    assert (alone.verdict, among.verdict) == ("better", "undecided")
    assert (among.low, among.high) == (alone.low, alone.high)
    assert paired(one, KeptArm("third", {"losses": {"0": 4.0}}), 1) is None


def test_a_comparison_is_turned_with_its_arms() -> None:
    report = study({"a": arm(), "b": arm()}, [contrast("a", "b", "better", -0.1, -0.15, -0.05)]).report
    a, b = (KeptArm(name, report["arms"][name]) for name in ("a", "b"))
    assert planned(report, a, b) == Difference(-0.1, -0.15, -0.05, 3, "better", True)
    assert planned(report, b, a) == Difference(0.1, 0.05, 0.15, 3, "worse", True)
    control = KeptArm("control", report["arms"]["control"])
    beaten = KeptArm("c", arm(**BETTER))
    assert planned(report, control, beaten) == Difference(0.1, 0.05, 0.15, 3, "worse", True)
    assert planned(report, a, KeptArm("d", arm())) is None


def test_a_verdict_that_a_study_withholds_is_no_evidence(monkeypatch: Patch) -> None:
    dense = against_control(None, 0.1, 0.05, 0.15) | {"no_verdict": "seconds disagree"}
    found = find(13, monkeypatch, aggregation(dense))
    assert found.verdict == "undecided" and ("not compared", "seconds disagree") in outcomes(found)


def test_a_rival_that_was_not_trained_is_not_beaten(monkeypatch: Patch) -> None:
    kept = local(BETTER)
    assert find(15, monkeypatch, kept).verdict == "holds"
    gate = PASSED | {"not_trained": ["canon"]}
    found = find(15, monkeypatch, study(kept.report["arms"], kept.report["contrasts"], gate=gate))
    assert found.verdict == "undecided" and ("not compared", "not trained: canon") in outcomes(found)


@pytest.mark.parametrize(
    ("low", "high", "verdict", "better", "as_good"),
    [
        (-0.15, -0.05, "better", "better", "better"),
        (-0.01, 0.01, "undecided", "no better", "as good"),
        (-0.03, 0.01, "undecided", "undecided", "as good"),
        (-0.03, 0.03, "undecided", "undecided", "undecided"),
        (-0.01, 0.03, "undecided", "no better", "undecided"),
        (0.05, 0.15, "worse", "no better", "no better"),
    ],
)
def test_outcomes(low: float, high: float, verdict: str, better: str, as_good: str) -> None:
    found = Difference((low + high) / 2, low, high, 3, verdict, True)
    assert judge(found, SMALLEST, "better") == better
    assert judge(found, SMALLEST, "as good") == as_good


def test_the_rule_is_dated_and_printed() -> None:
    for claim in select(range(13, 19)):
        assert "Fixed on 2026-11-29" in claim.rule
