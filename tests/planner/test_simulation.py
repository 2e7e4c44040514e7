"""A simulated step takes what closed forms say, breaks no dependency, and never holds more than is in flight."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.scale.timeline import timeline
from twoaxis.planner.formulas.schedules import (
    exposed_seconds,
    gpipe_order,
    ideal_bubble,
    interleaved_order,
    one_f_one_b_order,
    peak_memory,
    schedule_order,
    simulate,
    transfer_seconds,
)

PIPELINES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3)]
TRANSFERS = ["overlapped", "blocking"]


@dataclass(frozen=True)
class Run:
    """A pipeline and the times of its parts."""

    order: list[list[list]]
    times: tuple[list[float], list[float], list[float], list[float]]
    transfers: str

    @property
    def stages(self) -> int:
        return len(self.times[0])

    @property
    def result(self) -> dict[str, Any]:
        return simulate(self.order, *self.times, self.transfers)


def free(stages: int) -> tuple[list[float], list[float]]:
    return [0.0] * (stages - 1), [0.0] * (stages - 1)


@st.composite
def runs(draw: st.DrawFn) -> Run:
    schedule, virtual = draw(st.sampled_from(PIPELINES))
    ranks, rounds = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    microbatches = ranks * rounds if virtual > 1 else draw(st.integers(1, 9))
    stages = ranks * virtual

    def times(count: int, least: float) -> list[float]:
        return draw(st.lists(st.floats(least, 4.0), min_size=count, max_size=count))

    computing = times(stages, 0.01), times(stages, 0.01)
    return Run(
        schedule_order(schedule, ranks, virtual, microbatches),
        (*computing, times(stages - 1, 0.0), times(stages - 1, 0.0)),
        draw(st.sampled_from(TRANSFERS)),
    )


@pytest.mark.parametrize(("schedule", "virtual"), PIPELINES)
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("rounds", [1, 3])
def test_bubble_is_the_closed_form(schedule: str, virtual: int, ranks: int, rounds: int) -> None:
    microbatches, stages = rounds * ranks, ranks * virtual
    found = simulate(
        schedule_order(schedule, ranks, virtual, microbatches), [1.0] * stages, [2.0] * stages, *free(stages), "overlapped"
    )
    # All integers, so every time is exact.
    assert found["step_seconds"] == 3 * (virtual * microbatches + ranks - 1)
    assert found["bubble"] == pytest.approx((ranks - 1) / (virtual * microbatches + ranks - 1), abs=1e-12)
    assert found["bubble"] == pytest.approx(ideal_bubble(ranks, virtual, microbatches), abs=1e-12)
    assert found["idle_share"] == pytest.approx([found["bubble"]] * ranks, abs=1e-12)


@given(runs())
def test_every_action_runs_once_and_a_rank_runs_one_at_a_time_in_its_order(run: Run) -> None:
    found = run.result
    assert found["unfinished"] == 0
    for rank, actions in enumerate(run.order):
        own = [action for action in found["actions"] if action["rank"] == rank]
        assert [[action["kind"], action["stage"], action["microbatch"]] for action in own] == actions
        assert all(before["end"] <= after["start"] for before, after in itertools.pairwise(own))
        for action in own:
            seconds = run.times[0 if action["kind"] == "forward" else 1][action["stage"]]
            assert action["end"] == action["start"] + seconds
    assert found["step_seconds"] == max(action["end"] for action in found["actions"])
    busy = sum(action["end"] - action["start"] for action in found["actions"])
    assert found["bubble"] == pytest.approx(1 - busy / (len(run.order) * found["step_seconds"]), abs=1e-9)


@given(runs())
def test_inputs_are_there_before_they_are_used(run: Run) -> None:
    found, ranks = run.result, len(run.order)
    at = {(action["kind"], action["stage"], action["microbatch"]): action for action in found["actions"]}
    sent = {(each["kind"], each["boundary"], each["microbatch"]): each for each in found["transfers"]}
    for (kind, stage, microbatch), action in at.items():
        before = stage - 1 if kind == "forward" else stage + 1
        if kind == "backward" and stage == run.stages - 1:
            assert at["forward", stage, microbatch]["end"] <= action["start"]
        elif before >= 0:
            made = at[kind, before, microbatch]
            assert made["end"] <= action["start"]
            if ranks > 1:
                way = sent[kind, min(stage, before), microbatch]
                assert made["end"] <= way["start"] and way["end"] <= action["start"]
                assert (way["source"], way["target"]) == (before % ranks, stage % ranks)
                assert way["end"] == way["start"] + run.times[2 if kind == "forward" else 3][way["boundary"]]
    hops = 2 * (run.stages - 1) * len({action["microbatch"] for action in found["actions"]})
    assert len(found["transfers"]) == len(sent) == (hops if ranks > 1 else 0)


@given(runs())
def test_a_link_carries_one_transfer_at_a_time_and_a_blocked_sender_computes_nothing(run: Run) -> None:
    found = run.result
    for source in range(len(run.order)):
        mine = [each for each in found["transfers"] if each["source"] == source]
        for target in range(len(run.order)):
            link = [each for each in mine if each["target"] == target]
            assert all(before["end"] <= after["start"] for before, after in itertools.pairwise(link))
        if run.transfers == "blocking":
            own = [action for action in found["actions"] if action["rank"] == source]
            assert not [1 for each in mine for action in own if each["start"] < action["end"] and action["start"] < each["end"]]


@given(runs(), st.data())
def test_slower_transfers_never_shorten_a_step(run: Run, data: st.DataObject) -> None:
    more = [[seconds + data.draw(st.floats(0, 2)) for seconds in part] for part in run.times[2:]]
    slower = Run(run.order, (*run.times[:2], more[0], more[1]), run.transfers)
    assert slower.result["step_seconds"] >= run.result["step_seconds"]
    assert exposed_seconds(run.order, *run.times, run.transfers) >= 0
    overlapped = Run(run.order, run.times, "overlapped")
    assert run.result["step_seconds"] >= overlapped.result["step_seconds"]


def test_exposed_communication_is_what_the_first_microbatch_waits_and_the_last_gradient() -> None:
    # Two ranks, one microbatch: there and back, nothing to hide behind.
    assert exposed_seconds(gpipe_order(2, 1), [1, 1], [2, 2], [0.25], [0.5], "overlapped") == 0.75
    # GPipe hides all transfers but the first activations and the last gradients while they are shorter than the actions.
    four = [1.0] * 4, [2.0] * 4, [0.5] * 3, [0.25] * 3
    assert exposed_seconds(gpipe_order(4, 8), *four, "overlapped") == 3 * 0.75
    # With blocking ones each of the first rank's eight forward passes is followed by half a second, and so on all ranks.
    assert exposed_seconds(gpipe_order(4, 8), *four, "blocking") == 3 * 0.75 + 7 * 0.75
    # One rank has nobody to send to.
    assert exposed_seconds(interleaved_order(1, 3, 2), [1.0] * 3, [2.0] * 3, [9.0] * 2, [9.0] * 2, "blocking") == 0
    assert transfer_seconds(8e9, 50e9, 1e-5) == pytest.approx(0.16001) and transfer_seconds(0, 50e9, 1e-5) == 0


def test_both_directions_of_two_ranks_share_a_link_with_what_comes_round() -> None:
    # On two ranks with two stages each, gradients of boundary 0 and activations of boundary 1 go from rank 1 to rank 0.
    found = simulate(interleaved_order(2, 2, 2), [1.0] * 4, [1.0] * 4, [0.5, 3.0, 0.5], [3.0, 0.5, 3.0], "overlapped")
    back = [each for each in found["transfers"] if each["source"] == 1]
    assert {(each["kind"], each["boundary"]) for each in back} == {("forward", 1), ("backward", 0), ("backward", 2)}
    assert all(before["end"] <= after["start"] for before, after in itertools.pairwise(back))


def in_flight(order: Sequence[list[list]], **bytes_of: Any) -> list[float]:
    stages = 1 + max(action[1] for actions in order for action in actions)
    none = [0.0] * (stages - 1)
    given_bytes = {"fixed_bytes": [0.0] * len(order), "saved_bytes": [0.0] * stages} | bytes_of
    found = simulate(list(order), [1.0] * stages, [2.0] * stages, none, none, "overlapped")
    waiting = [[0.0] * stages, [0.0] * stages]
    defaults = {"activation_bytes": none, "gradient_bytes": none, "waiting_bytes": waiting}
    return peak_memory(found, **defaults | given_bytes)  # type: ignore[arg-type]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("microbatches", [4, 9])
def test_microbatches_in_flight(ranks: int, microbatches: int) -> None:
    ones, twos = [1.0] * ranks, [1.0] * (2 * ranks)
    assert in_flight(gpipe_order(ranks, microbatches), saved_bytes=ones) == [microbatches] * ranks
    assert in_flight(one_f_one_b_order(ranks, microbatches), saved_bytes=ones) == [ranks - r for r in range(ranks)]
    # Of arXiv:2104.04473: what runs ahead, and the one that runs.
    ahead = [min(ranks + 2 * (ranks - 1 - r) + 1, 2 * 2 * ranks) for r in range(ranks)]
    assert in_flight(interleaved_order(ranks, 2, 2 * ranks), saved_bytes=twos) == ahead


def test_what_is_received_is_held_from_its_transfer_to_the_backward_pass() -> None:
    order = one_f_one_b_order(2, 3)
    # Rank 0 has two in flight; of the activations it sends, rank 1 holds that of the one it runs and the next.
    assert in_flight(order, fixed_bytes=[5.0, 7.0], activation_bytes=[10.0]) == [5, 27]
    # A gradient at a time, while it is used; nothing comes back to the last rank.
    assert in_flight(order, gradient_bytes=[100.0]) == [100, 0]
    assert in_flight(gpipe_order(2, 3), activation_bytes=[10.0], gradient_bytes=[100.0]) == [100, 30]
    # Stages of one rank send each other nothing.
    assert in_flight(interleaved_order(1, 2, 2), saved_bytes=[1.0, 1.0], activation_bytes=[10.0]) == [2]


def test_gradients_wait_from_the_last_stage_of_a_rank_to_the_one_that_sends_them_on() -> None:
    order = interleaved_order(2, 2, 4)
    waiting = [[0.0, 0.0, 0.0, 1.0], [0.0, 1.0, 0.0, 0.0]]
    own = [action for action in order[1] if action[0] == "backward"]
    # Two microbatches pass stage 3 backwards before the first of them passes stage 1.
    assert [action[1] for action in own[:4]] == [3, 3, 1, 1]
    assert in_flight(order, waiting_bytes=waiting) == [0, 2]


@given(runs(), st.data())
def test_memory_lies_between_one_microbatch_and_all(run: Run, data: st.DataObject) -> None:
    ranks, stages, microbatches = len(run.order), run.stages, 1 + max(a[2] for a in run.order[0])

    def some(count: int) -> list[float]:
        return [float(number) for number in data.draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))]

    fixed, saved, activations, gradients = some(ranks), some(stages), some(stages - 1), some(stages - 1)
    peaks = peak_memory(run.result, fixed, saved, activations, gradients, [[0.0] * stages] * 2)
    for rank, peak in enumerate(peaks):
        own = range(rank, stages, ranks)
        received = [activations[s - 1] if s and ranks > 1 else 0 for s in own]
        returned = [gradients[s] if s < stages - 1 and ranks > 1 else 0 for s in own]
        each = [saved[s] + a + g for s, a, g in zip(own, received, returned, strict=True)]
        assert fixed[rank] + max(each) <= peak <= fixed[rank] + microbatches * sum(each)


def test_an_order_that_waits_for_itself_is_told() -> None:
    found = simulate([[["backward", 0, 0], ["forward", 0, 0]]], [1.0], [1.0], [], [], "overlapped")
    assert (found["unfinished"], found["step_seconds"], found["idle_share"]) == (2, 0.0, [0.0])


def drawn(spec: dict[str, Any], what: str) -> list[dict[str, Any]]:
    """The bars of one sort, each once."""
    rows = [row for layer in spec["layer"] for row in layer["data"]["values"] if row["what"] == what]
    return list({(row["start"], row["top"]): row for row in rows}.values())


@pytest.mark.parametrize("width", [324, 940])
def test_timeline_draws_every_action_and_transfer_in_the_row_of_its_rank(width: int) -> None:
    order, times = interleaved_order(3, 2, 6), ([0.01] * 6, [0.02] * 6, [0.001] * 5, [0.002] * 5)
    found = simulate(order, *times, "overlapped")
    figure = timeline(found, "interleaved 1F1B", exposed_seconds(order, *times, "overlapped"), virtual=2)
    spec = figure.draw(width).to_dict()
    for kind, sent, part in (("forward", "activations sent", 0), ("backward", "gradients sent", 1)):
        bars = drawn(spec, kind)
        assert [int(bar["top"]) for bar in bars] == [action["rank"] for action in found["actions"] if action["kind"] == kind]
        assert [bar["end"] - bar["start"] for bar in bars] == pytest.approx([1e3 * times[part][0]] * 36)
        ways = drawn(spec, sent)
        assert [int(way["top"]) for way in ways] == [each["source"] for each in found["transfers"] if each["kind"] == kind]
        assert [way["end"] - way["start"] for way in ways] == pytest.approx([1e3 * times[part + 2][0]] * 30)
        # What a rank sends stands below what it computes.
        assert min(way["top"] % 1 for way in ways) >= max(bar["bottom"] % 1 for bar in bars)
    assert len(drawn(spec, "idle")) == 3
    assert max(bar["end"] for bar in drawn(spec, "backward")) == pytest.approx(1e3 * found["step_seconds"])
    numbers = [row["number"] for layer in spec["layer"] if layer["mark"]["type"] == "text" for row in layer["data"]["values"]]
    assert len(numbers) == (72 if width > 324 else 36) and set(numbers) == set("012345")


def test_timeline_says_its_numbers() -> None:
    times = [1.0, 1.0], [2.0, 2.0], [0.25], [0.5]
    found = simulate(gpipe_order(2, 1), *times, "overlapped")
    figure = timeline(found, "GPipe", exposed_seconds(gpipe_order(2, 1), *times, "overlapped"))
    # 6.75 s, of which each rank computes 3.
    numbers = "Step 6.75 s; ranks idle 55.6 % of it on average; communication adds 0.75 s, 11.1 % of the step."
    assert numbers in figure.caption and numbers in figure.alternative and "paler" not in figure.caption
    assert figure.alternative.endswith("Idle by rank: 55.6 %, 55.6 %.")
    nothing = simulate([[]], [1.0], [1.0], [], [], "overlapped")
    assert timeline(nothing, "nothing", 0.0).draw(324).to_dict()["layer"]
