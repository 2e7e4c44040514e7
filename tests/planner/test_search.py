"""The search finds what a look at every arrangement finds, keeps to what is fixed, and says what would help."""

import re
from typing import Any

import pytest

from twoaxis import DecoderConfig
from twoaxis.core.errors import ConfigError
from twoaxis.planner.coefficients import coefficients
from twoaxis.planner.formulas import training_step as formulas
from twoaxis.planner.hardware import read_device
from twoaxis.planner.model.shape import ModelShape
from twoaxis.planner.search import BATCH_TOKENS, Request, _estimates, find_setting
from twoaxis.planner.setting import ParallelLayout, Setting

H100 = read_device("h100")


def model(n_layers: int = 6, d_model: int = 1024, depth: str = "residual") -> ModelShape:
    attention = {"kind": "attention", "n_heads": 8}
    data = {"vocab_size": 4096, "d_model": d_model, "n_layers": n_layers, "depth": depth, "blocks": [[attention, "swiglu"]]}
    return ModelShape.of_decoder(DecoderConfig.from_data(data), "small")


def setting(pipeline: int, virtual: int, microbatches: int, **fields: Any) -> Setting:
    layout = ParallelLayout(
        gpus=pipeline,
        pipeline=pipeline,
        virtual=virtual,
        microbatches=microbatches,
        schedule="gpipe" if fields.pop("gpipe", 0) else "1f1b",
    )
    return Setting(H100, layout, batch=microbatches, tokens=256, **fields)


CASES = (
    (3, 1, 31, {}),
    (3, 1, 40, {"gpipe": 1}),
    (4, 1, 50, {"transfers": "blocking", "recompute": "block"}),
    (3, 2, 60, {"forwarding": "cached"}),
    (5, 1, 64, {"transfers": "blocking"}),
    (2, 3, 40, {"transfers": "blocking"}),
    (1, 1, 20, {}),
)


@pytest.mark.parametrize(("pipeline", "virtual", "microbatches", "fields"), CASES)
def test_a_step_of_many_microbatches_is_that_of_the_full_simulation(
    pipeline: int, virtual: int, microbatches: int, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The history makes messages long and stages uneven.
    numbers = coefficients(model(7, depth="attention_residuals"))
    chosen = setting(pipeline, virtual, microbatches, **fields)
    short = chosen.training_step(numbers)
    simulated = {action["microbatch"] for action in short["simulation"]["actions"]}
    monkeypatch.setattr(formulas, "simulated_microbatches", lambda ranks, asked: [asked, asked])
    full = chosen.training_step(numbers)
    assert len(simulated) < microbatches == len({action["microbatch"] for action in full["simulation"]["actions"]})
    for name in ("step_seconds", "pipeline_seconds", "exposed_seconds", "bubble"):
        assert short[name] == pytest.approx(full[name], rel=1e-9, abs=1e-12)
    assert short["memory_bytes"] == pytest.approx(full["memory_bytes"], rel=1e-9)


@pytest.mark.parametrize(("pipeline", "virtual", "microbatches", "fields"), CASES)
def test_the_estimate_is_near_the_simulation(pipeline: int, virtual: int, microbatches: int, fields: dict[str, Any]) -> None:
    numbers = coefficients(model(12))
    chosen = setting(pipeline, virtual, microbatches, **fields)
    real = chosen.training_step(numbers)
    found = formulas.estimated_step(numbers, chosen.run, chosen.rates, chosen.links)
    assert found["step_seconds"] == pytest.approx(real["step_seconds"], rel=0.1)
    assert found["memory_bytes"] == pytest.approx(max(real["memory_bytes"]), rel=0.1)


@pytest.mark.parametrize("fields", [{}, {"pipeline": 2}, {"virtual": 2, "pipeline": 2}, {"recompute": "block"}])
def test_the_setting_is_the_best_of_all(fields: dict[str, Any]) -> None:
    small = model(6)
    numbers = coefficients(small)
    request = Request(H100, gpus=4, tokens=512, batch=64, **fields)
    chosen = find_setting(small, numbers, request)
    every = [each.setting for each in _estimates(small, numbers, request)]
    steps = [each.training_step(numbers) for each in every]
    fitting = [step["step_seconds"] for step in steps if max(step["memory_bytes"]) <= request.memory_limit_bytes]
    assert chosen.training_step(numbers)["step_seconds"] == pytest.approx(min(fitting), rel=1e-3)
    for name, value in fields.items():
        assert getattr(chosen.layout if name in ("pipeline", "virtual") else chosen, name) == value


def test_a_setting_asked_for_is_the_setting_found() -> None:
    small = model(6)
    layout = ParallelLayout(gpus=8, tensor=2, pipeline=2, data=2, microbatches=4, sequence="tensor")
    asked = Setting(H100, layout, batch=16, tokens=512, recompute="block", sharding="weights")
    assert find_setting(small, coefficients(small), Request.fixed(asked)) == asked


def test_the_batch_is_near_the_default_and_divides() -> None:
    assert Request(H100, gpus=64, tokens=8192).sequences == 512
    assert Request(H100, gpus=48, tokens=8192).sequences == 528
    assert Request(H100, gpus=64, tokens=2**20).sequences == 4
    assert Request(H100, gpus=64, tokens=2**20, data=8, microbatches=3).sequences == 24
    assert Request(H100, gpus=8, tokens=2 * BATCH_TOKENS).sequences == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"gpus": 0}, "gpus=0: must be at least 1"),
        ({"tensor": 0}, "tensor=0: must be at least 1"),
        ({"tensor": 3}, "tensor=3: must be a divisor of gpus=8"),
        ({"batch": 3, "data": 8}, "batch=3: must be a multiple of data=8"),
        ({"tensor": 8, "gpus": 16, "pipeline": 2, "data": 2}, "must be data * pipeline * tensor = 2 * 2 * 8 = 32"),
        ({"pipeline": 8}, "pipeline * virtual=8: must be at most the 6 layers of small"),
        ({"tensor": 16, "gpus": 16}, "tensor=16: must be a divisor of the 8 heads of 'attention'"),
        ({"sequence": "tensor", "tensor": 8, "tokens": 9}, "tokens=9: must be a multiple of tensor=8"),
    ],
)
def test_what_cannot_be_is_one_line(fields: dict[str, Any], message: str) -> None:
    small = model(6)
    with pytest.raises(ConfigError) as caught:
        find_setting(small, coefficients(small), Request(**{"device": H100, "gpus": 8, "tokens": 512, **fields}))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_devices_that_are_not_connected() -> None:
    alone = H100.replace(fast_link=None, network=None)
    with pytest.raises(ConfigError, match="gpus=2: must be at most 1 of h100, which has no network"):
        Request(alone, gpus=2, tokens=512)


def test_what_does_not_fit_says_how_many_devices_would() -> None:
    large = model(8, 8192)
    numbers = coefficients(large)
    request = Request(H100, gpus=1, tokens=4096)
    with pytest.raises(ConfigError) as caught:
        find_setting(large, numbers, request)
    text = str(caught.value)
    assert "small on 1 x h100: the least memory found is" in text and "must be at most 72.0 GB" in text
    gpus = int(re.findall(r"use (\d+) GPUs", text)[0])
    find_setting(large, numbers, request.replace(gpus=gpus))
    with pytest.raises(ConfigError, match="least memory found"):
        find_setting(large, numbers, request.replace(gpus=gpus // 2))
    with pytest.raises(ConfigError, match=r"leave recompute to the search|use \d+ GPUs"):
        find_setting(large, numbers, request.replace(recompute="off"))
