"""Schedules are pure functions of the step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twoaxis import ConfigError
from twoaxis.train import SCHEDULES, ConstantConfig, CosineConfig, TrainConfig, WSDConfig

KINDS = [row.kind for row in SCHEDULES]


@given(st.sampled_from(KINDS), st.integers(1, 60), st.data())
def test_rises_linearly_then_never_again(kind: str, steps: int, data: st.DataObject) -> None:
    warmup = data.draw(st.integers(0, steps))
    schedule = SCHEDULES.parse({"kind": kind, "warmup_steps": warmup})
    rates = [schedule.multiplier(step, steps) for step in range(steps)]
    assert rates[:warmup] == [(step + 1) / warmup for step in range(warmup)]
    assert all(0 < rate <= 1 for rate in rates)
    assert all(later <= earlier for earlier, later in zip(rates[warmup:], rates[warmup + 1 :], strict=False))


def test_cosine_by_hand() -> None:
    schedule = CosineConfig(warmup_steps=0, min_ratio=0.2)
    assert [schedule.multiplier(step, 4) for step in (0, 2)] == pytest.approx([1.0, 0.6])


def test_wsd_by_hand() -> None:
    schedule = WSDConfig(warmup_steps=2, decay_fraction=0.4, min_ratio=0.0)
    assert [schedule.multiplier(step, 10) for step in range(10)] == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25])
    assert all(WSDConfig(warmup_steps=1, decay_fraction=0).multiplier(step, 5) == 1 for step in range(5))


def test_default_warm_up_is_a_twentieth() -> None:
    assert [ConstantConfig().warmup(steps) for steps in (1, 20, 21, 1000)] == [1, 1, 2, 50]


def test_warm_up_longer_than_the_run_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"schedule.warmup_steps=11: must be at most steps=10; warm up for fewer steps"):
        TrainConfig.from_data(
            {"model": {"d_model": 8, "n_layers": 1}, "steps": 10, "schedule": {"kind": "wsd", "warmup_steps": 11}}
        )
    with pytest.raises(ConfigError, match=r"unknown schedule 'cosin'; did you mean 'cosine'\?"):
        TrainConfig.from_data({"model": {"d_model": 8, "n_layers": 1}, "schedule": "cosin"})
