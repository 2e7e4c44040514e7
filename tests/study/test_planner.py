"""The plan: arms cost what the design says they cost, companions stand beside the arms they say something about."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from twoaxis.core.errors import ConfigError
from twoaxis.depth import DEPTH
from twoaxis.study import StudyConfig
from twoaxis.study.planning import plan_study
from twoaxis.study.planning.equal_cost import closest, closest_in_order, flops_per_step, spread_over, straight_line
from twoaxis.study.planning.study_plan import StudyPlan
from twoaxis.study.report.text_tables import PLAN_COLUMNS, plan_rows

from .scripted import fake_timer


def _plan(data: dict[str, Any], **changes: Any) -> StudyPlan:
    return plan_study(StudyConfig.from_data({**data, **changes}), fake_timer)


def _depth_study(data: dict[str, Any], **depths: Any) -> dict[str, Any]:
    arms = {"plain": {}} | {name: {"model": {"depth": depth}} for name, depth in depths.items()}
    model = {"d_model": 32, "n_layers": 4, "max_seq_len": 16, "blocks": [[{"kind": "attention", "n_heads": 2}, "swiglu"]]}
    return {**data, "arms": arms, "base": {**data["base"], "model": model}}


def test_a_plan_survives_a_round_trip(study_data: dict[str, Any]) -> None:
    plan = _plan(_depth_study(study_data, mhc="mhc"), controls=True, budget={"steps": 40, "ladder": [0.5, 2.0]})
    assert StudyPlan.from_data(plan.to_data()) == plan


def test_a_budget_in_flops_gives_every_arm_what_it_can_afford(study_data: dict[str, Any]) -> None:
    plan = _plan(study_data, budget={"flops": 1e8})
    assert len({arm.steps for arm in plan.arms}) > 1
    for arm in plan.arms:
        per_step = flops_per_step(arm.train_config(0))
        assert abs(arm.flops - 1e8) <= per_step / 2, "the nearest whole step"


def test_a_budget_in_seconds_needs_a_timer_and_uses_it(study_data: dict[str, Any]) -> None:
    plan = _plan(study_data, budget={"seconds": 2.0})
    for arm in plan.arms:
        assert plan.seconds_of(arm) == pytest.approx(2.0, rel=0.05)
    study = StudyConfig.from_data({**study_data, "budget": {"seconds": 2.0}})
    with pytest.raises(ConfigError, match="seconds: must be measured"):
        plan_study(study)


@pytest.mark.parametrize("unit", ["flops", "seconds"])
def test_steps_match_what_is_spent(study_data: dict[str, Any], unit: str) -> None:
    plan = _plan(study_data, match=unit, budget={"steps": 200})
    control = plan.control
    for arm in plan.of_role("treatment"):
        spent = {"flops": (arm.flops, control.flops), "seconds": (plan.seconds_of(arm), plan.seconds_of(control))}[unit]
        assert spent[0] == pytest.approx(spent[1], rel=0.01)
        (change,) = arm.changes
        assert (change.path, change.after, change.of) == ("steps", arm.steps, unit)
        assert change.wanted == pytest.approx(spent[1])
    assert control.steps == 200 and not control.changes


def test_widths_match_parameters(study_data: dict[str, Any]) -> None:
    data = _depth_study(study_data, mhc="mhc")
    data["arms"]["wide"] = {"match": {"on": "params", "by": "model.d_model", "to": "mhc", "tolerance": 0.05}}
    plan = _plan(data)
    assert plan.arm("wide").parameters == pytest.approx(plan.arm("mhc").parameters, rel=0.05)
    assert plan.arm("wide").recipe["model"]["d_model"] > 32
    (change,) = plan.arm("wide").changes
    assert (change.before, change.to) == (32, "mhc")


def test_windows_match_flops(study_data: dict[str, Any]) -> None:
    swa = {"kind": "short_swa", "window": 2, "n_heads": 2}
    blocks = [[swa, {"kind": "attention", "n_heads": 2}, "swiglu"]]
    data = _depth_study(study_data)
    wider = {"kind": "short_swa", "window": 11, "n_heads": 2}
    data["arms"] = {
        "plain": {"model": {"blocks": [[wider, *blocks[0][1:]]]}},
        "narrow": {"model": {"blocks": blocks}, "match": {"on": "flops", "by": "model.blocks.0.0.window", "at_most": 16}},
    }
    assert _plan(data).arm("narrow").recipe["model"]["blocks"][0][0]["window"] == 11


MISMATCHES = {
    "too coarse": ({"on": "params", "by": "model.d_model", "multiple_of": 16, "to": "mhc"}, r"come to .* within 0.02 of 1"),
    "no such key": ({"on": "params", "by": "model.width"}, "must be a key of the recipe"),
    "not a number": ({"on": "params", "by": "model.depth.kind"}, "must hold a whole number"),
    "steps for parameters": ({"on": "params", "by": "steps"}, "steps change no size"),
    "an unknown arm": ({"on": "flops", "to": "mch"}, "did you mean 'mhc'"),
    "an unknown unit": ("flop", "did you mean 'flops'"),
}


@pytest.mark.parametrize(("match", "message"), MISMATCHES.values(), ids=MISMATCHES)
def test_what_cannot_be_matched_is_refused(study_data: dict[str, Any], match: Any, message: str) -> None:
    data = _depth_study(study_data, mhc="mhc")
    data["arms"]["wide"] = {"match": match}
    with pytest.raises(ConfigError, match=message) as caught:
        _plan(data)
    assert "\n" not in str(caught.value)


def test_the_ladder_is_the_control_at_other_budgets(study_data: dict[str, Any]) -> None:
    plan = _plan(study_data, budget={"steps": 40, "ladder": [2.0, 0.5]})
    rungs = plan.of_role("rung")
    assert [(arm.name, arm.steps, arm.seeds) for arm in rungs] == [("plain@0.5x", 20, (0, 1, 2)), ("plain@2x", 80, (0, 1, 2))]
    for rung in rungs:
        assert {**rung.recipe, "steps": 40} == plan.control.recipe


@pytest.mark.parametrize("ladder", [[0.5], [1.0, 2.0], [0.5, 0.5], [0.0, 2.0]])
def test_ladders_that_say_nothing_are_refused(study_data: dict[str, Any], ladder: list[float]) -> None:
    with pytest.raises(ConfigError, match="two different multiples"):
        _plan(study_data, budget={"steps": 40, "ladder": ladder})


def test_every_arm_gets_equally_many_trials(study_data: dict[str, Any]) -> None:
    tuning = {"lr": [1e-3, 1e-2], "seed": 7, "arms": {"delta": [3e-3, 3e-2]}}
    plan = _plan(study_data, tuning=tuning, budget={"steps": 40, "ladder": [0.5, 2.0]})
    trials = plan.of_role("trial")
    assert [arm.name for arm in trials] == [
        *("plain@lr=0.001", "plain@lr=0.01", "delta@lr=0.003", "delta@lr=0.03", "local@lr=0.001", "local@lr=0.01")
    ]
    assert {arm.seeds for arm in trials} == {(7,)}
    assert plan.arm("delta@lr=0.03").train_config(7).optimizer.lr == 0.03
    assert {arm.tuned_as for arm in plan.of_role("rung")} == {"plain"}, "rungs learn at the rate of the control"
    with pytest.raises(ConfigError, match="equally many trials"):
        _plan(study_data, tuning={"lr": [1e-3, 1e-2], "arms": {"delta": [1e-3, 1e-2, 1e-1]}})
    with pytest.raises(ConfigError, match=r"tuning\.seed=1: must be none of the replicates"):
        _plan(study_data, tuning={"lr": [1e-3, 1e-2], "seed": 1})


def test_companions_stand_where_they_say_something(study_data: dict[str, Any]) -> None:
    kinds = {"delta": "deep_delta", "mhc": "mhc", "hyper": "hyper_connections", "mudd": "muddformer", "dense": "denseformer"}
    kinds["frac"] = "frac_connections"
    data = _depth_study(study_data, **kinds)
    data["arms"]["local"] = {"model": {"blocks": [["short_conv", {"kind": "attention", "n_heads": 2}, "swiglu"]]}}
    plan = _plan(data, controls=True, controls_match=["flops", "seconds"])
    found = {(contrast.arm, contrast.against) for contrast in plan.contrasts}
    assert {("delta", "delta~write_only"), ("mudd", "mudd~static_weights"), ("mhc", "mhc~wider_stream@flops")} <= found
    assert {("delta", "~residual_scalars"), ("dense", "~residual_scalars")} <= found
    matched = {(one.arm, one.against, one.matched) for one in plan.contrasts}
    # On the machine of the timer seconds are FLOPs, so one arm answers for both.
    assert {("mudd", "mudd~short_swa@flops", "flops"), ("mudd", "mudd~short_swa@flops", "seconds")} <= matched
    assert not any(arm == "local" for arm, _ in found), "it does not differ on the depth axis"
    assert not any("write_only" in against for arm, against in found if arm != "delta")
    assert not any("wider_stream" in against for arm, against in found if arm not in ("mhc", "hyper"))
    unmixed = {arm: plan.arm(against).recipe["model"]["depth"] for arm, against in found if "unmixed" in against}
    assert {name: depth["residual"] for name, depth in unmixed.items()} == dict.fromkeys(("mhc", "hyper", "frac"), "identity")
    assert all(arm.why for arm in plan.of_role("companion"))
    for name in ("mhc~wider_stream@flops", "mudd~short_swa@flops"):
        (change,) = plan.arm(name).changes
        control, extra = flops_per_step(plan.control.train_config(0)), change.wanted
        assert change.got - control == pytest.approx(extra - control, rel=0.5)
        assert change.got == pytest.approx(flops_per_step(plan.arm(name).train_config(0)))
    wide = plan.arm("mhc~wider_stream@flops").recipe["model"]
    assert wide["depth"]["kind"] == "residual" and wide["blocks"][0][0]["head_dim"] == 16, "inner widths stay"


def test_heads_along_depth_have_controls_of_weights_temperature_norms_and_none(study_data: dict[str, Any]) -> None:
    depths: dict[str, Any] = {
        "moda": {"kind": "mixture_of_depths_attention", "slots": "attention"},
        "values": {"kind": "depth_value_mixing", "stride": 2},
        "attnres": {"kind": "attention_residuals", "n_heads": 2},
        "one": "attention_residuals",
        "states": {"kind": "depth_attention", "n_heads": 2, "qk_norm": "head"},
    }
    plan = _plan(_depth_study(study_data, **depths), controls=["static_weights", "unmixed", "softmax_temperature", "qk_norm"])
    found = {one.against: plan.arm(one.against).recipe["model"]["depth"] for one in plan.contrasts if "~" in one.against}
    assert {name: _differences(depths[name.split("~")[0]], depth) for name, depth in found.items() if "static" not in name} == {
        "moda~unmixed": {"weights": "off", "slots": "attention_and_feed_forward"},
        "values~unmixed": {"weights": "off", "stride": 1},
        "attnres~softmax_temperature": {"key_scale": "head"},
        "states~softmax_temperature": {"temperature": "learned"},
        "states~qk_norm": {"qk_norm": "none"},
    }
    for arm in ("moda", "values"):
        assert _differences(depths[arm], found[f"{arm}~static_weights"]) == {"weights": "uniform"}


def _differences(arm: Any, companion: dict[str, Any]) -> dict[str, Any]:
    """The options of a companion that are not those of its arm."""
    own = DEPTH.parse(arm).to_data()
    return {name: value for name, value in companion.items() if value != own[name]}


def test_feed_forwards_widen_to_the_parameters_of_an_arm(study_data: dict[str, Any]) -> None:
    depths = {"moda": "mixture_of_depths_attention", "values": "depth_value_mixing", "delta": "deep_delta"}
    plan = _plan(_depth_study(study_data, **depths), controls=["wider_feed_forward"], controls_match=["seconds"])
    found = {one.arm: (one.against, one.matched) for one in plan.contrasts}
    assert found == {name: (f"{name}~wider_feed_forward@params", "params") for name in ("moda", "delta")}, (
        "equal ones need none"
    )
    wide, moda = plan.arm("moda~wider_feed_forward@params"), plan.arm("moda")
    assert wide.parameters == pytest.approx(moda.parameters, rel=0.005) and wide.parameters != plan.control.parameters
    assert wide.recipe["model"]["depth"]["kind"] == "residual" and wide.recipe["model"]["blocks"][0][0]["kind"] == "attention"
    (change,) = wide.changes
    assert (change.of, change.to, change.wanted) == ("params", "moda", moda.parameters)
    assert change.after > change.before == 96


def test_without_feed_forwards_none_widens(study_data: dict[str, Any]) -> None:
    data = _depth_study(study_data, delta="deep_delta")
    data["base"]["model"]["blocks"] = [[{"kind": "attention", "n_heads": 2}]]
    plan = _plan(data, controls=["wider_feed_forward"])
    assert plan.notes == ("delta: no wider_feed_forward at equal params: the control has nothing to widen",)


def test_an_arm_of_the_design_is_its_own_companion(study_data: dict[str, Any]) -> None:
    data = _depth_study(study_data, attnres={"kind": "attention_residuals", "block_size": 2}, dense="denseformer")
    data["arms"]["scalars"] = {"model": {"depth": "residual_scalars"}}
    plan = _plan(data, controls=["static_weights", "residual_scalars"])
    assert not plan.of_role("companion")
    assert {(one.arm, one.against) for one in plan.contrasts} == {
        *(("attnres", "dense"), ("attnres", "scalars"), ("dense", "scalars"))
    }


def test_what_is_left_out_is_said(study_data: dict[str, Any]) -> None:
    plan = plan_study(
        StudyConfig.from_data(
            {**_depth_study(study_data, dense="denseformer"), "controls": ["short_swa"], "controls_match": ["seconds"]}
        )
    )
    assert plan.notes == ("dense: short_swa at equal seconds is planned only once seconds are measured",)


@pytest.mark.parametrize("kind", [row.kind for row in DEPTH])
def test_forms_that_mixers_name_exist(kind: str) -> None:
    row = DEPTH[kind]
    for name in row.examples:
        config = row.example(name)
        for form in (config.controls().static, config.controls().write_only):
            assert form is None or DEPTH.parse(dict(form)) != config
        assert config.controls().streams >= 1


def test_plan_rows_say_what_was_changed(study_data: dict[str, Any]) -> None:
    plan = _plan(study_data, match="flops", budget={"steps": 200})
    rows = [dict(zip(PLAN_COLUMNS, row, strict=True)) for row in plan_rows(plan)]
    assert rows[0]["what was changed"] == "—"
    assert rows[1]["what was changed"].startswith("steps ") and "(flops of the control: 0.998)" in rows[1]["what was changed"]
    assert rows[0]["hours"].endswith(" h") and rows[0]["memory"] == "0 MiB"


def test_helpers_of_the_search() -> None:
    assert spread_over(list(range(100)), 3) == [0, 50, 99]
    assert spread_over([1, 2], 5) == [1, 2]
    assert straight_line([(1.0, 2.0)])(5.0) == 2.0


def _scan(costs: Sequence[float | None], wanted: float) -> int | None:
    buildable = [number for number, cost in enumerate(costs) if cost is not None]
    return closest(buildable, lambda number: costs[number] or 0.0, wanted) if buildable else None


PLATEAUS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 30), st.sampled_from([True, True, False])), max_size=12)


@given(PLATEAUS, st.integers(-2, 60), st.sampled_from([1, -1]), st.sampled_from([0.0, 3.0, 1e9]))
@example([(0, 7, True), (1, 30, True), (1, 30, True)], 3, 1, 1e9)
def test_the_search_finds_what_a_scan_finds(
    plateaus: list[tuple[int, int, bool]], halves: int, sign: int, tolerance: float
) -> None:
    costs, cost = list[float | None](), 0
    for step, length, built in plateaus:
        cost += step
        costs += [float(sign * cost) if built else None] * length
    wanted = sign * halves / 2
    assert closest_in_order(len(costs), costs.__getitem__, wanted, tolerance) == _scan(costs, wanted)


@given(st.lists(st.none() | st.integers(0, 40).map(float), max_size=40), st.integers(0, 40))
def test_without_order_the_search_ends_within_the_tolerance_or_scans(costs: list[float | None], wanted: int) -> None:
    found, best = closest_in_order(len(costs), costs.__getitem__, wanted, 2.0), _scan(costs, wanted)
    assert (found is None) == (best is None)
    if found is not None and found != best:
        cost = costs[found]
        assert cost is not None and abs(cost - wanted) <= 2.0


@pytest.mark.parametrize("sign", [1, -1])
def test_a_search_in_order_asks_for_few_costs(sign: int) -> None:
    asked = list[int]()

    def cost(number: int) -> float:
        asked.append(number)
        return float(sign * number)

    assert closest_in_order(5000, cost, sign * 1234.2, 1.0) == 1234
    assert len(asked) == len(set(asked)) <= 40


def test_a_companion_that_equals_the_control_is_no_second_comparison(study_data: dict[str, Any]) -> None:
    data = _depth_study(study_data, scalars="residual_scalars", delta="deep_delta")
    plan = _plan({**data, "control": "scalars"}, controls=["residual_scalars", "write_only"])
    assert {(one.arm, one.against) for one in plan.contrasts} == {("delta", "delta~write_only")}


def test_a_comparison_of_the_design_is_not_made_again_the_other_way_round(study_data: dict[str, Any]) -> None:
    data = _depth_study(study_data, delta="deep_delta", write={"kind": "deep_delta", "update_rule": "write_only"})
    plan = _plan(data, controls=["write_only"], contrasts=[{"arm": "write", "against": "delta"}])
    assert [(one.arm, one.against) for one in plan.contrasts] == [("write", "delta")]


def test_a_design_without_a_verdict_says_so_before_the_first_run(study_data: dict[str, Any]) -> None:
    decision = {"smallest_effect": 0.05, "charge": "flops"}
    (note,) = [note for note in _plan(study_data, decision=decision).notes if note.startswith("delta")]
    assert note.startswith("delta: no verdict at equal FLOPs: it takes 1.0") and note.endswith("or give budget.ladder")
    short = _plan(study_data, decision=decision, budget={"steps": 40, "ladder": [0.5, 0.75]}).notes
    (note,) = [note for note in short if note.startswith("delta")]
    assert "whose loss is measured at 0.5 to 1 times its budget only" in note and note.endswith("or lengthen budget.ladder")
    for decided in (
        {"budget": {"steps": 400}, "match": "flops"},
        {"budget": {"flops": 1e10}},
        {"budget": {"steps": 40, "ladder": [0.5, 2.0]}},
    ):
        assert not _plan(study_data, decision=decision, **decided).notes


def test_a_budget_in_flops_matches_the_control(study_data: dict[str, Any]) -> None:
    plan = _plan(study_data, budget={"flops": 1e10})
    for arm in plan.of_role("treatment"):
        (change,) = arm.changes
        assert (change.path, change.after, change.of, change.to) == ("steps", arm.steps, "flops", "the control")
        assert (change.got, change.wanted) == (pytest.approx(arm.flops), pytest.approx(plan.control.flops))
    assert not plan.control.changes
