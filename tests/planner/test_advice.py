"""The comparison adds up, the advice is the paper's with the plan's own numbers."""

import json
from typing import Any

import pytest

from twoaxis import DecoderConfig
from twoaxis.planner.advice import RECOMMENDED
from twoaxis.planner.comparison import Budget, count_methods
from twoaxis.planner.evidence import evidence
from twoaxis.planner.hardware import read_device
from twoaxis.planner.methods import Goal, methods
from twoaxis.planner.model.latent_attention import LatentAttention
from twoaxis.planner.model.shape import ModelShape
from twoaxis.planner.model_plan import ModelPlan, plan_model
from twoaxis.planner.quantities import Precision
from twoaxis.planner.search import Request

GOALS: tuple[Goal, ...] = ("shortcut", "local-mixing", "both")


def small(**changes: Any) -> ModelShape:
    attention = {"kind": "attention", "n_heads": 4}
    data = {"vocab_size": 512, "d_model": 256, "n_layers": 4, "blocks": [[attention, "swiglu"]], **changes}
    return ModelShape.of_decoder(DecoderConfig.from_data(data), "small")


def planned(
    goal: Goal | None = None, budget: Budget | None = None, shape: ModelShape | None = None, **request: Any
) -> ModelPlan:
    asked = {"gpus": 4, "tokens": 512, "batch": 64, "pipeline": 2, **request}
    return plan_model(shape or small(), Request(read_device("h100"), **asked), goal, budget)


@pytest.fixture(scope="module")
def plans() -> dict[Goal, ModelPlan]:
    return {goal: planned(goal) for goal in GOALS}


def test_every_method_is_planned_or_refused(plans: dict[Goal, ModelPlan]) -> None:
    found = plans["shortcut"].comparison
    names = {cost.name for cost in found.methods} | {each.method.name for each in found.refused} | {found.control.name}
    assert names == {method.name for method in methods()}


def test_methods_are_in_the_order_of_their_cost_beyond_the_control(plans: dict[Goal, ModelPlan]) -> None:
    found = plans["both"].comparison
    seconds = [cost.step_seconds for cost in found.methods]
    assert seconds == sorted(seconds)
    for cost in found.methods:
        assert cost.step_seconds == pytest.approx((1 + cost.step_overhead) * found.control.step_seconds)
        assert cost.params == found.control.params + cost.added_params
    assert found.control.step_overhead == found.control.added_params == 0
    by_name = {cost.name: cost for cost in found.methods}
    assert by_name["AttnRes full"].boundary_bytes > found.control.boundary_bytes == by_name["DDL"].boundary_bytes > 0
    assert by_name["ShortSWA w=128"].cache_bytes > by_name["DDL"].cache_bytes == found.control.cache_bytes
    assert (by_name["DenseFormer 1x1"].at_initialisation, by_name["DDL"].at_initialisation) == ("exact", "none")


def test_latent_attention_generates_in_the_latent() -> None:
    latent = LatentAttention(n_heads=4, kv_rank=64, q_rank=None, nope_dim=32, rope_dim=16, value_dim=32)
    counted, _ = count_methods(ModelShape("latent", 512, 256, ((latent,),) * 2), methods()[:1], Precision())
    (one,) = counted.values()
    training, generating = (numbers["sublayers"][0]["pairs"] for numbers in (one.numbers, one.generating))
    assert (training, generating) == ([[2 * 4 * (32 + 16 + 32), 0]], [[2 * 4 * (2 * 64 + 16), 0]])


@pytest.mark.parametrize("goal", GOALS)
def test_the_recommendation_is_the_papers_with_the_numbers_of_the_plan(goal: Goal, plans: dict[Goal, ModelPlan]) -> None:
    plan, found = plans[goal], plans[goal].recommendation
    assert found is not None and found.method == RECOMMENDED[goal][0]
    assert found.cost == plan.comparison.named(found.method)
    others = plan.comparison.of_goal(goal)
    assert others[found.rank - 1] == found.cost and found.of == len(others) == 1 + len(found.cheaper) + len(found.dearer)
    assert found.studies == evidence(goal)


def test_both_together_add_up(plans: dict[Goal, ModelPlan]) -> None:
    found = plans["both"].comparison
    together, depth, local = (found.named(RECOMMENDED[goal][0]) for goal in ("both", "shortcut", "local-mixing"))
    assert together is not None and depth is not None and local is not None
    # The added sublayers are read and written by the depth mixer, too.
    assert together.added_params > depth.added_params + local.added_params
    assert together.step_overhead > max(depth.step_overhead, local.step_overhead)


@pytest.mark.parametrize("goal", GOALS)
def test_what_ifs_are_plans_of_their_own(goal: Goal, plans: dict[Goal, ModelPlan]) -> None:
    found = plans[goal].recommendation
    assert found is not None and found.cost is not None
    by_change = {each.change.split(" (")[0]: each for each in found.what_ifs}
    assert set(by_change) == {"twice the context", "4 pipeline ranks", "2 stages on each rank", "eager depth operations"}
    assert not any(each.impossible for each in found.what_ifs)
    other = planned(None, shape=small(), tokens=1024, batch=32).comparison.named(RECOMMENDED[goal][0])
    if goal != "both":
        assert other is not None and by_change["twice the context"].step_overhead == pytest.approx(other.step_overhead)
    for each in found.what_ifs:
        assert each.matters == (each.rank != each.rank_before or each.over != each.over_before)
        assert 1 <= each.rank <= each.of


def test_one_device_has_what_ifs_without_a_pipeline() -> None:
    found = planned("local-mixing", gpus=1, pipeline=None, batch=4).recommendation
    assert found is not None
    assert [each.change.split(" (")[0] for each in found.what_ifs] == ["twice the context", "eager depth operations"]


def test_over_budget_is_marked_and_the_cheapest_within_is_named() -> None:
    free = planned("shortcut")
    control, own = free.comparison.control, free.comparison.named("DDL")
    assert own is not None and own.over == () and free.recommendation is not None and free.recommendation.instead is None
    tight = planned("shortcut", Budget(memory_bytes=own.memory_bytes - 1, latency_seconds=control.token_seconds * 100))
    found = tight.recommendation
    assert found is not None and found.cost is not None and found.cost.over == ("memory",)
    assert found.instead is not None and found.instead.memory_bytes < own.memory_bytes
    assert all(
        cost.over for cost in tight.comparison.of_goal("shortcut")[: tight.comparison.of_goal("shortcut").index(found.instead)]
    )
    none = planned("shortcut", Budget(latency_seconds=control.token_seconds / 2)).recommendation
    assert none is not None and none.cost is not None and none.cost.over == ("latency",) and none.instead is None


def test_a_recommendation_that_does_not_fit_says_why() -> None:
    shape = ModelShape("parallel", 512, 256, small().blocks, branches="parallel")
    found = planned("shortcut", shape=shape).recommendation
    assert found is not None and found.cost is None and "branches are parallel" in found.refusal
    json.dumps(found.to_data())


def test_the_depth_mixer_of_the_model_is_a_row_of_its_own() -> None:
    given = planned(shape=small(depth={"kind": "attention_residuals", "block_size": 3}))
    assert given.comparison.named("attention_residuals as given") is not None
    assert given.comparison.control.params == planned().comparison.control.params
    known = planned(shape=small(depth="deep_delta"))
    assert not any("as given" in cost.name for cost in known.comparison.methods)


def test_a_method_that_the_arrangement_cannot_cut_is_refused() -> None:
    refused = {each.method.name: each.reason for each in planned(gpus=4, tensor=4, pipeline=1).comparison.refused}
    assert "tensor=4: must be a divisor of the 2 heads of 'short_swa'" in refused["ShortSWA w=128"]
