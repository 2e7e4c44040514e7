"""A layout that cannot be is refused in one line, and one that can says what it runs."""

from typing import Any

import pytest

from twoaxis import DecoderConfig
from twoaxis.core.errors import ConfigError
from twoaxis.planner.formulas.schedules import gpipe_order, interleaved_order, one_f_one_b_order, schedule_order
from twoaxis.planner.hardware import read_device
from twoaxis.planner.model.shape import ModelShape
from twoaxis.planner.quantities import Precision
from twoaxis.planner.search import Request
from twoaxis.planner.setting import ParallelLayout, Setting


def model(n_heads: int = 4, n_kv_heads: int = 4, n_layers: int = 4) -> ModelShape:
    attention = {"kind": "attention", "n_heads": n_heads, "n_kv_heads": n_kv_heads}
    data = {"vocab_size": 16, "d_model": 24, "n_layers": n_layers, "blocks": [[attention, "swiglu"]]}
    return ModelShape.of_decoder(DecoderConfig.from_data(data), "tiny")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"gpus": 8, "tensor": 2, "pipeline": 2},
            "gpus=8: must be data * pipeline * tensor = 1 * 2 * 2 = 4; change one of them",
        ),
        ({"gpus": 0}, "gpus=0: must be"),
        ({"gpus": 1, "tensor": -1}, "tensor=-1: must be"),
        ({"gpus": 1, "stages": 2}, "unknown"),
        ({"gpus": 1, "virtual": 2}, "virtual=2: must be 1 with pipeline=1; use more pipeline ranks"),
        (
            {"gpus": 2, "pipeline": 2, "virtual": 2, "microbatches": 2, "schedule": "gpipe"},
            "schedule='gpipe': must be '1f1b' with virtual > 1; use virtual=1",
        ),
        (
            {"gpus": 2, "pipeline": 2, "virtual": 2, "microbatches": 3},
            "microbatches=3: must be a multiple of pipeline=2 with virtual > 1; change one of them, or use virtual=1",
        ),
        ({"gpus": 1, "sequence": "tensor"}, "sequence='tensor': must be 'none' with tensor=1; use more tensor ranks"),
    ],
)
def test_grids_that_cannot_be(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ParallelLayout.from_data(fields)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("layout", "shape", "message"),
    [
        (
            {"gpus": 5, "pipeline": 5},
            model(),
            "pipeline * virtual=5: must be at most the 4 layers of tiny; use fewer stages",
        ),
        (
            {"gpus": 2, "pipeline": 2, "virtual": 3, "microbatches": 2},
            model(),
            "pipeline * virtual=6: must be at most the 4 layers of tiny; use fewer stages",
        ),
        (
            {"gpus": 3, "tensor": 3},
            model(),
            "tensor=3: must be a divisor of the 4 heads of 'attention'; use fewer tensor ranks",
        ),
        (
            {"gpus": 4, "tensor": 4},
            model(12, 6),
            "tensor=4: must be a divisor or a multiple of the 6 key-value heads of 'attention'; "
            "use another number of tensor ranks",
        ),
        (
            {"gpus": 4, "tensor": 4, "sequence": "tensor"},
            model(),
            "tokens=10: must be a multiple of tensor=4; use sequence='none'",
        ),
    ],
)
def test_models_that_cannot_be_cut(layout: dict[str, Any], shape: ModelShape, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ParallelLayout.from_data(layout).check(shape, tokens=10)
    assert str(caught.value) == message


def test_models_that_can_be_cut() -> None:
    ParallelLayout(gpus=16, tensor=4, pipeline=4).check(model(), tokens=10)
    # More ranks than key-value heads: each head on two of them.
    ParallelLayout(gpus=4, tensor=4, sequence="tensor").check(model(4, 2), tokens=12)


def test_the_batch_is_cut_over_data_ranks_and_microbatches() -> None:
    layout = ParallelLayout(gpus=6, pipeline=3, data=2, microbatches=4)
    assert layout.microbatch(24) == 3
    for batch in (0, 12):
        with pytest.raises(ConfigError, match=rf"^batch={batch}: must be a multiple of data \* microbatches = 2 \* 4 = 8; "):
            layout.microbatch(batch)


def test_the_run_names_the_schedule() -> None:
    layout = ParallelLayout(gpus=2, pipeline=2, microbatches=4)
    orders = {"1f1b": layout, "gpipe": layout.replace(schedule="gpipe"), "interleaved": layout.replace(virtual=3)}
    for name, each in orders.items():
        assert Setting(read_device("h100"), each, batch=4, tokens=8).run["schedule"] == name
    assert orders["interleaved"].stages == 6
    for schedule, order in (("1f1b", one_f_one_b_order), ("gpipe", gpipe_order)):
        assert schedule_order(schedule, 2, 1, 4) == order(2, 4)
    assert schedule_order("interleaved", 2, 3, 4) == interleaved_order(2, 3, 4)


def test_an_activation_has_the_bytes_of_a_number_format() -> None:
    layout = ParallelLayout(gpus=1)
    with pytest.raises(ConfigError, match=r"^precision\.activations=3: must be one of 1, 2, 4, 8 bytes; use 2 for bfloat16$"):
        Setting(read_device("h100"), layout, batch=1, tokens=8, precision=Precision(activations=3))


@pytest.mark.parametrize(
    ("word", "value"),
    [("recompute", "blocks"), ("sharding", "zero3"), ("forwarding", "cache"), ("engine", "fuse"), ("transfers", "blocked")],
)
def test_unknown_words_are_refused(word: str, value: str) -> None:
    given: dict[str, Any] = {word: value}
    layout = ParallelLayout(gpus=1)
    with pytest.raises(ConfigError, match=f"^{word}='{value}': must be one of "):
        Setting(read_device("h100"), layout, batch=1, tokens=8, **given)
    if word != "transfers":
        with pytest.raises(ConfigError, match=f"^{word}='{value}': must be one of "):
            Request(read_device("h100"), gpus=1, tokens=8, **given)
