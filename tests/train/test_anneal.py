"""Parameters that a recipe moves, and parameters that it freezes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from twoaxis.core.errors import ConfigError
from twoaxis.model import Decoder, DecoderConfig
from twoaxis.study.report.analysis import rates_of
from twoaxis.study.timing import measure
from twoaxis.train import Progress, TrainConfig, train
from twoaxis.train.optim import OptimizerConfig, build_optimizer, parameter_groups
from twoaxis.train.schedule import AnnealConfig, Annealing


def _model() -> Decoder:
    depth = {"kind": "deep_delta", "blend": "annealed"}
    return Decoder.build(DecoderConfig.from_data({"vocab_size": 11, "d_model": 8, "n_layers": 2, "depth": depth}))


def test_values_follow_from_the_step_alone() -> None:
    config = AnnealConfig(pattern="*.blend", start=1.0, stop=3.0, begin=2, steps=4)
    assert [config.value(step) for step in (0, 2, 3, 6, 100)] == [1.0, 1.0, 1.5, 3.0, 3.0]
    model = _model()
    Annealing(model, [config]).set(3)
    blends = [parameter for name, parameter in model.named_parameters() if name.endswith(".blend")]
    assert len(blends) == 4
    assert all(blend.item() == 1.5 for blend in blends)


def test_a_pattern_that_matches_nothing() -> None:
    with pytest.raises(
        ConfigError, match=r"anneal pattern '\*.blent' matches no parameter of this model; did you mean '\*.blend'"
    ):
        Annealing(_model(), [AnnealConfig(pattern="*.blent", steps=1)])


def test_frozen_parameters_ask_for_no_gradient_and_have_no_state() -> None:
    model = _model()
    config = OptimizerConfig.from_data(
        {"groups": [{"pattern": "*", "lr_scale": 0.0}, {"pattern": "*.target_weight", "lr_scale": 2.0}]}
    )
    optimizer = build_optimizer(parameter_groups(model, config), config)
    total, count = model.loss(torch.tensor([[1, 2, 3]]), torch.tensor([[2, 3, 4]]))
    (total / count).backward()
    with_gradient = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert with_gradient == {name for name, _ in model.named_parameters() if name.endswith(".target_weight")}
    optimizer.step()
    assert len(optimizer.state) == len(with_gradient)


def test_one_must_be_trained() -> None:
    config = OptimizerConfig.from_data({"groups": [{"pattern": "*", "lr_scale": 0.0}]})
    with pytest.raises(ConfigError, match="every parameter is frozen"):
        build_optimizer(parameter_groups(_model(), config), config)


@pytest.fixture
def annealed(recipe: Callable[..., TrainConfig]) -> Callable[..., TrainConfig]:
    def make(steps: int, **changes: Any) -> TrainConfig:
        model = {**recipe().model, "depth": {"kind": "deep_delta", "blend": "annealed"}}
        return recipe(model=model, steps=4, anneal=[{"pattern": "*.blend", "steps": steps}], **changes)

    return make


def test_a_run_that_ends_before_the_last_value_says_so(annealed: Callable[..., TrainConfig], tmp_path: Path) -> None:
    lines: list[str] = []

    class Notes(Progress):
        def note(self, text: str) -> None:
            lines.append(text)

    for steps in (3, 4):
        train(annealed(steps), tmp_path / str(steps), Notes())
    said = [line for line in lines if line.startswith("anneal")]
    assert said == ["anneal pattern '*.blend': takes 5 steps to reach 1, and the run has 4; the last value is 0.75"]


def test_what_a_recipe_anneals_is_frozen_wherever_it_is_built(annealed: Callable[..., TrainConfig]) -> None:
    config = annealed(3)
    model = Decoder.build(config.decoder(256))
    frozen = {
        name for group in parameter_groups(model, config.parameter_options) if not group.lr_scale for name in group.parameters
    }
    assert frozen == {name for name, _ in model.named_parameters() if name.endswith(".blend")}
    assert [one.lr for one in rates_of(config, 256) if one.what == "mixing"] == [0.0]
    plain, moved = (measure({"a": one}).state_bytes["a"] for one in (config.replace(anneal=()), config))
    assert plain - moved == 12 * len(frozen), "no gradient and no moments"
