"""Seconds of steps: what slows a whole round down is nobody's, and what is left uncertain goes into the interval."""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from twoaxis.study import StudyConfig
from twoaxis.study.report.analysis import analyse
from twoaxis.study.timing import ROUNDS, Timing, main, measure

from .scripted import FakeTrainer, fake_timer


def _timing(seconds: dict[str, list[float]]) -> Timing:
    return Timing(
        warmup_steps=1,
        steps_in_a_turn=1,
        seconds={name: tuple(values) for name, values in seconds.items()},
        state_bytes=dict.fromkeys(seconds, 0),
        saved_bytes=dict.fromkeys(seconds, 0),
        environment={},
    )


def test_a_drifting_machine_and_a_disturbed_turn_leave_the_ratio_alone() -> None:
    drift = [1.0, 1.3, 2.0, 0.8, 5.0, 1.0, 1.1]
    seconds = {name: [factor * d for d in drift] for name, factor in (("a", 1.0), ("b", 1.5), ("c", 2.0))}
    seconds["b"][3] *= 40.0
    timing = _timing(seconds)
    assert timing.ratio("b", "a") == pytest.approx(1.5)
    assert timing.ratio("c", "a") == pytest.approx(2.0)
    assert timing.ratio("a", "a") == 1.0 and timing.log_ratio("a", "a")[1] == 0.0


@pytest.mark.parametrize("arms", ["ab", "abc", "abcdefg"])
def test_the_error_of_a_ratio_is_that_of_repeated_timings(arms: str) -> None:
    """In simulation, nearly 95 % of ratios lie within two of the errors that are stated for them."""
    draw, inside, trials = random.Random(0), 0, 400
    for _ in range(trials):
        rounds = [draw.gauss(0, 0.3) for _ in range(15)]
        noisy = {
            name: [math.exp(effect + shared + draw.gauss(0, 0.1)) for shared in rounds]
            for name, effect in zip(arms, (0.0, 0.2, 0.4, 0.1, 0.3, 0.5, 0.6), strict=False)
        }
        log_ratio, error = _timing(noisy).log_ratio("b", "a")
        inside += abs(log_ratio - 0.2) <= 2 * error
    assert 0.85 <= inside / trials <= 0.98


def test_uncertain_seconds_widen_the_interval_at_equal_seconds(study_data: dict[str, Any], trainer: FakeTrainer) -> None:
    trainer.study = StudyConfig.from_data({**study_data, "budget": {"steps": 60, "ladder": [0.5, 0.75, 1.5, 2.0]}})
    trainer.spread(local=-0.01)
    records, plan = trainer.run(), trainer.plan
    assert plan.timing is not None
    jitter = {"plain": (1.0, 1.0, 1.0), "delta": (1.0, 1.0, 1.0), "local": (0.8, 1.0, 1.2)}
    shaken = {
        name: tuple(s * j for s, j in zip(times, jitter[name], strict=True)) for name, times in plan.timing.seconds.items()
    }
    sure, unsure = (
        analyse(trainer.study, plan.replace(timing=timing), records, trainer.baselines, timing_after=timing).arms["local"]
        for timing in (plan.timing, plan.timing.replace(seconds=shaken))
    )
    assert sure.step_seconds_ratio_error == 0.0 and (unsure.step_seconds_ratio_error or 0) > 0.05
    for charge, wider in (("seconds", True), ("flops", False), ("tokens", False)):
        found = [{str(k): v for k, v in arm.charged.items()}[charge].comparison for arm in (sure, unsure)]
        widths = [one.ci95[1] - one.ci95[0] for one in found if one is not None and one.ci95 is not None]
        assert len(widths) == 2 and (widths[1] > 1.5 * widths[0]) == wider
    ends = [(arm.speedup["seconds"].high or 0) - (arm.speedup["seconds"].low or 0) for arm in (sure, unsure)]
    assert ends[1] > ends[0] > 0


def test_measures_what_it_is_given(study: StudyConfig, tmp_path: Path) -> None:
    recipes = {name: study.recipe(name, 0) for name in study.arms}
    (tmp_path / "recipes.json").write_text(json.dumps({name: one.to_data() for name, one in recipes.items()}))
    main(tmp_path / "recipes.json", tmp_path / "timing.json")
    timing = Timing.from_data(json.loads((tmp_path / "timing.json").read_text()))
    assert set(timing.seconds) == set(study.arms)
    assert all(len(times) == ROUNDS == timing.rounds and min(times) > 0 for times in timing.seconds.values())
    parameters = fake_timer(recipes)
    assert timing.saved_bytes["local"] > timing.saved_bytes["plain"] > 0 and parameters.rounds == 3
    assert timing.state_bytes["delta"] > timing.state_bytes["plain"]


def test_saved_bytes_are_those_of_a_step(study: StudyConfig) -> None:
    """Twice the layers keep about twice the activations."""
    one = study.recipe("plain", 0)
    two = one.replace(model={**one.model, "n_layers": 2})
    saved = measure({"one": one, "two": two}).saved_bytes
    assert 1.3 < saved["two"] / saved["one"] < 2.2


# Dynamo looks for a gradient on tensors inside the model, and hides the warning only after it has become an error here.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("mode", ["block", "model"])
def test_arms_that_are_compiled_do_not_meet_each_others_limits(
    mode: str, study: StudyConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames, real = CompileCounter(), torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: real(function, backend=frames, **options))
    depths = (
        "residual",
        "residual_scalars",
        "deep_delta",
        "denseformer",
        "hyper_connections",
        "siamese_norm",
        "elc_bert",
        "residual_dual",
        "norm_placement",
    )
    # Blocks of one layer meet their limit at the third arm, whole models at the ninth.
    chosen = depths[:4] if mode == "block" else depths
    one = study.recipe("plain", 0).replace(compile=mode)
    torch._dynamo.reset()
    try:
        timing = measure(
            {depth: one.replace(model={**one.model, "depth": {"kind": depth}, "blocks": [["swiglu"]]}) for depth in chosen}
        )
    finally:
        torch._dynamo.reset()
    assert set(timing.seconds) == set(chosen) and frames.frame_count >= len(chosen)
