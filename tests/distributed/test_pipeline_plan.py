"""What a pipeline refuses, and what it knows before its first step, on one process."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from twoaxis.core.errors import ConfigError
from twoaxis.depth import DEPTH
from twoaxis.model import Decoder, DecoderConfig
from twoaxis.planner.coefficients import coefficients
from twoaxis.planner.formulas.roofline import collective_seconds
from twoaxis.planner.formulas.training_step import by_rank, stage_memory, training_step
from twoaxis.planner.hardware import read_device
from twoaxis.planner.ledger import Forwarding
from twoaxis.planner.model.shape import ModelShape
from twoaxis.planner.setting import ParallelLayout, Setting
from twoaxis.sequence import SEQUENCE
from twoaxis.train.parallel.boundaries import PipelineConfig, make_plan
from twoaxis.train.parallel.pipeline import Pipeline
from twoaxis.train.parallel.stage import build_part

from ..payload import payload
from .pipeline_cases import decoder, pipeline

# Examples of a mixer differ in few tensors: every other one.
EXAMPLES = [(row.kind, name) for row in DEPTH for index, name in enumerate(row.examples) if index % 4 == 0]


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=10))
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(("kind", "name"), EXAMPLES, ids=lambda part: part)
def test_tensors_that_are_the_same_are_those_that_have_one_name(kind: str, name: str) -> None:
    model = decoder(DEPTH[kind].example(name))
    naive = make_plan(model, pipeline(ranks=4), rows=1, tokens=1, dtype=torch.float64)
    variants: tuple[tuple[int, Forwarding], ...] = ((4, "naive"), (2, "cached"), (2, "cached_own"))
    for ranks, forwarding in variants:
        plan = replace(naive, ranks=ranks, forwarding=forwarding)
        named = payload(ModelShape.of_decoder(model), ranks, 4 // ranks, forwarding, element_bytes=8)
        assert tuple(plan.sent_bytes(boundary) for boundary in range(3)) == named.hops
        assert tuple(plan.returned_bytes(boundary) for boundary in range(3)) == named.hops


@pytest.mark.parametrize(("kind", "name"), [(row.kind, n) for row in SEQUENCE for n in row.examples], ids=lambda part: part)
def test_a_plan_needs_no_memory_for_any_sublayer(kind: str, name: str) -> None:
    model = decoder("denseformer", blocks=[[SEQUENCE[kind].example(name), "gelu"]])
    plan = make_plan(model, pipeline(ranks=4), rows=2, tokens=5, dtype=torch.float32)
    assert [plan.sent_bytes(boundary) for boundary in range(3)] == [4 * 2 * 5 * 8 * (3 + boundary) for boundary in range(3)]


def test_parts_together_are_the_decoder(alone: None) -> None:
    config = decoder("attention_residuals")
    whole = Decoder.build(config, seed=3)
    part = Pipeline(config, pipeline(ranks=1), batch_size=4, seq_len=2, seed=3).model
    torch.testing.assert_close(dict(part.named_parameters()), dict(whole.named_parameters()), rtol=0, atol=0)


@pytest.mark.parametrize("head", ["stream", "read"])
@pytest.mark.parametrize("virtual", [1, 2])
def test_a_rank_holds_the_parameters_that_the_planner_counts(virtual: int, head: str) -> None:
    """Matrices that all readers share stand once on every rank, however many stages it has."""
    config = decoder({"kind": "depth_attention", "n_heads": 2, "head": head})
    ranks, shape = 2, ModelShape.of_decoder(config)
    layout = ParallelLayout(gpus=ranks, pipeline=ranks, virtual=virtual, microbatches=ranks)
    setting = Setting(read_device("h100"), layout, batch=ranks, tokens=4)
    memory = stage_memory(coefficients(shape), setting.run)
    blocks = PipelineConfig(
        ranks=ranks, virtual=virtual, schedule="interleaved" if virtual > 1 else "1f1b", microbatches=ranks
    ).blocks(config.n_layers)
    held = []
    for rank in range(ranks):
        part = build_part(
            config,
            [block for stage in range(rank, ranks * virtual, ranks) for block in blocks[stage]],
            holds_first=rank == 0,
            holds_last=rank == ranks - 1,
            seed=0,
            device=torch.device("cpu"),
            dtype=torch.float32,
        )
        held.append(sum(parameter.numel() for parameter in part.parameters()))
    assert by_rank(memory["params"], ranks) == held


def test_the_planner_charges_the_sum_of_shared_gradients_to_every_step() -> None:
    config = decoder({"kind": "depth_attention", "n_heads": 2})
    numbers = coefficients(ModelShape.of_decoder(config))
    setting = Setting(read_device("h100"), ParallelLayout(gpus=2, pipeline=2, microbatches=2), batch=2, tokens=4)
    run, lent = setting.run, 4 * 8**2 + 8
    assert numbers["ends"]["lent"] == numbers["ends"]["params"] == lent
    step = training_step(numbers, run, setting.rates, setting.links)
    alone = training_step({**numbers, "ends": {**numbers["ends"], "lent": 0}}, run, setting.rates, setting.links)
    # An all-reduce over two ranks sends as many bytes as the gradient has.
    ring = collective_seconds(lent * numbers["gradients_bytes"], setting.links["pipeline"])
    assert step["gradient_seconds"] == pytest.approx(alone["gradient_seconds"] + ring, rel=1e-12)
    assert ring > 0


@pytest.mark.parametrize("options", [{}, {"schedule": "gpipe"}, {"schedule": "interleaved", "virtual": 4}])
def test_one_rank_is_a_pipeline_too(alone: None, options: dict[str, Any]) -> None:
    config = decoder("denseformer")
    whole = Decoder.build(config).double()
    alone_on_all = Pipeline(config, pipeline(ranks=1, **options), batch_size=4, seq_len=5, dtype=torch.float64)
    tokens = torch.arange(20).reshape(4, 5) % 11
    total, count = whole.loss(tokens, tokens.roll(-1, 1))
    total.backward()
    step = alone_on_all.step(tokens, tokens.roll(-1, 1))
    torch.testing.assert_close(step.total, total.detach())
    assert step.tokens == count
    for name, parameter in alone_on_all.model.named_parameters():
        torch.testing.assert_close(parameter.grad, whole.get_parameter(name).grad)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": 0}, "ranks=0: must be >= 1"),
        ({"ranks": 5}, "microbatches=4: must be at least ranks=5 with schedule='1f1b'"),
        ({"ranks": 2, "virtual": 2}, "virtual=2: must be 1 with schedule='1f1b'"),
        ({"ranks": 2, "schedule": "interleaved", "microbatches": 5}, "microbatches=5: must be a multiple of the 2 rounds"),
        ({"ranks": 2, "forwarding": "cached"}, "virtual=1: must be 2 or more with forwarding='cached'"),
        (
            {"ranks": 1, "schedule": "interleaved", "virtual": 2, "forwarding": "cached_own"},
            "ranks=1: must be 2 or more with forwarding='cached_own'",
        ),
        ({"ranks": 2, "schedule": "1b1f"}, "did you mean '1f1b'?"),
    ],
)
def test_impossible_pipelines_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        pipeline(**options)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ({"ranks": 2}, {}, "ranks=2: must be 1, the number of processes in the group; change it, or start as many"),
        ({"ranks": 1, "schedule": "interleaved", "virtual": 5}, {}, "stages=5: must be at most the 4 blocks of the decoder"),
        ({"ranks": 1}, {"batch_size": 6}, "batch_size=6: must be a multiple of microbatches=4"),
        ({"ranks": 1}, {"batch_size": 0}, "batch_size=0: must be a multiple of microbatches=4"),
        ({"ranks": 1}, {"seq_len": 9}, "seq_len=9: must be in 1..max_seq_len=8"),
    ],
)
def test_what_does_not_fit_is_refused_at_once(
    alone: None, config: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    model: DecoderConfig = decoder("residual", max_seq_len=8)
    with pytest.raises(ConfigError) as error:
        Pipeline(model, PipelineConfig.from_data({"microbatches": 4, **config}), **{"batch_size": 4, "seq_len": 5, **options})
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_another_length_is_refused(alone: None) -> None:
    running = Pipeline(decoder("residual"), pipeline(ranks=1), batch_size=4, seq_len=5)
    tokens = torch.zeros(4, 6, dtype=torch.int64)
    with pytest.raises(ConfigError) as error:
        running.step(tokens, tokens)
    assert str(error.value) == (
        "shape of tokens=[4, 6]: must be [4, 5], for which this pipeline has its buffers; "
        "drop a shorter last batch, or build another Pipeline"
    )


def test_autocast_is_refused(alone: None) -> None:
    running = Pipeline(decoder("residual"), pipeline(ranks=1), batch_size=4, seq_len=5)
    tokens = torch.zeros(4, 5, dtype=torch.int64)
    with torch.autocast("cpu"), pytest.raises(ConfigError, match="autocast is on: must be off"):
        running.step(tokens, tokens)
