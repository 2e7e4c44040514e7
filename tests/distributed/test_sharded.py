"""A19: sharded runs are those of one process: losses, weights, checkpoints, interruptions, and what is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from twoaxis.core.errors import ConfigError
from twoaxis.depth import DEPTH, DepthConfig
from twoaxis.model import Decoder
from twoaxis.planner.coefficients import coefficients
from twoaxis.planner.hardware import read_device
from twoaxis.planner.model.shape import ModelShape
from twoaxis.planner.quantities import Precision
from twoaxis.planner.setting import ParallelLayout, Setting
from twoaxis.sequence import SEQUENCE, SequenceConfig
from twoaxis.study import timing
from twoaxis.testing.sharded import sharded_equals_whole
from twoaxis.train import Result, load_trained, train
from twoaxis.train.checkpoint import load_checkpoint

from .processes import run_processes
from .sharded_worker import (
    BEGINNING,
    EARLIER_TOKENS,
    FEW_HEADS,
    LONGER,
    MUON,
    MUON_FEW_HEADS,
    NEWEST,
    STEPS,
    THREE_BLOCKS,
    TIMED,
    TIMED_ROUNDS,
    losses,
    recipe,
)

RANKS, PROCESSES = 2, 4
WORKER = Path(__file__).with_name("sharded_worker.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs of two ranks, and that of one process from the same recipe."""
    folder = tmp_path_factory.mktemp("sharded")
    train(recipe(folder, steps=BEGINNING), folder / "other_windows")
    run_processes(WORKER, folder, PROCESSES, timeout_seconds=300)
    train(recipe(folder), folder / "whole")
    return folder


def found(folder: Path, name: str, ranks: int = RANKS) -> Any:
    """What a scenario came to, on all ranks alike."""
    every = [json.loads((folder / f"found-{rank}.json").read_text())[name] for rank in range(ranks)]
    assert every[1:] == every[:-1], every
    return every[0]


def close(a: list[list[float | None]], b: list[list[float | None]], rtol: float = 1e-6) -> None:
    assert [[entry is None for entry in row] for row in a] == [[entry is None for entry in row] for row in b]
    numbers = [torch.tensor([[0.0 if entry is None else entry for entry in row] for row in one]) for one in (a, b)]
    torch.testing.assert_close(*numbers, rtol=rtol, atol=0)


def same_files(run: Path, other: Path) -> None:
    one, two = (path / "checkpoints" / NEWEST for path in (run, other))
    files = sorted(path.name for path in one.glob("*.safetensors"))
    assert len(files) == 2 and files == sorted(path.name for path in two.glob("*.safetensors"))
    for name in files:
        a, b = load_file(one / name), load_file(two / name)
        assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a), name


def test_losses_and_weights_are_those_of_one_process(folder: Path) -> None:
    assert found(folder, "straight") == found(folder, "again") == "finished"
    close(losses(folder / "straight"), losses(folder / "whole"))
    sharded, whole = (load_trained(folder / name).model.state_dict() for name in ("straight", "whole"))
    # The first updates of AdamW divide by small second moments.
    torch.testing.assert_close(sharded, whole, rtol=1e-4, atol=5e-6)


def test_initial_values_are_those_of_one_process(folder: Path) -> None:
    sharded, whole = (json.loads((folder / name / "initial_parameters.json").read_text()) for name in ("straight", "whole"))
    assert sharded == whole


def test_replicas_are_one_process_too(folder: Path) -> None:
    assert (found(folder, "replicated"), found(folder, "replicated shards", 4)) == ("finished", "finished")
    close(losses(folder / "replicated"), losses(folder / "whole"))
    close(losses(folder / "replicated_shards"), losses(folder / "whole"))


def test_a_stopped_run_resumes_bit_for_bit(folder: Path) -> None:
    assert found(folder, "stopped") == ["interrupted", "finished"]
    assert losses(folder / "stopped") == losses(folder / "straight")
    same_files(folder / "stopped", folder / "straight")


def test_checkpoints_of_the_background_are_those_of_a_run_that_waits(folder: Path) -> None:
    assert found(folder, "background") == ["finished", "finished"]
    assert losses(folder / "background") == losses(folder / "straight")
    same_files(folder / "background", folder / "straight")
    train(recipe(folder, parallel={"saving": "background"}), folder / "whole_background")
    assert losses(folder / "whole_background") == losses(folder / "whole")
    same_files(folder / "whole_background", folder / "whole")


def test_autocast_is_that_of_one_process(folder: Path) -> None:
    assert found(folder, "bfloat16") == ["finished", "finished"]
    train(recipe(folder, precision="bfloat16"), folder / "whole_bfloat16")
    close(losses(folder / "bfloat16"), losses(folder / "whole_bfloat16"), rtol=2e-3)
    close(losses(folder / "stages_bfloat16"), losses(folder / "whole_bfloat16"), rtol=2e-3)


def test_a_recipe_of_its_own_is_refused_on_every_rank(folder: Path) -> None:
    said = found(folder, "other recipe")
    assert said.startswith("ConfigError: recipe: ") and "on rank 1: must be equal on all ranks" in said
    assert not (folder / "other" / "config.json").exists()


def test_a_full_disk_leaves_the_earlier_checkpoint(folder: Path) -> None:
    said, left, after = found(folder, "full disk")
    assert (
        said.startswith(f"CheckpointError: checkpoint of step {STEPS}: cannot be written") and "No space left on device" in said
    )
    assert (left, after) == ([f"step-{BEGINNING:08}"], "finished")
    assert losses(folder / "full") == losses(folder / "straight")


def test_a_missing_shard_is_noticed_and_the_checkpoint_before_it_used(folder: Path) -> None:
    assert found(folder, "missing shard") == "finished"
    assert losses(folder / "missing") == losses(folder / "straight")
    assert [path.name for path in (folder / "missing" / "checkpoints").glob("damaged-*")]


@pytest.fixture(scope="module")
def longer(folder: Path) -> list[list[float | None]]:
    """The losses of one process over more steps."""
    train(recipe(folder, steps=LONGER), folder / "whole_longer")
    return losses(folder / "whole_longer")


def test_one_process_goes_on_from_shards(folder: Path, longer: list[list[float | None]]) -> None:
    shutil.copytree(folder / "straight", folder / "on_one")
    assert train(recipe(folder, steps=LONGER), folder / "on_one").steps == LONGER
    close(losses(folder / "on_one"), longer)


def test_two_ranks_go_on_from_one_process_and_may_compute_other_windows_at_once(folder: Path) -> None:
    assert found(folder, "other windows") == "finished"
    close(losses(folder / "other_windows"), losses(folder / "whole"))


def test_a_stage_without_an_end_is_one_process_too(folder: Path) -> None:
    assert found(folder, "three stages", 3) == "finished"
    train(recipe(folder, model=THREE_BLOCKS), folder / "whole_three")
    close(losses(folder / "three_stages"), losses(folder / "whole_three"))


def test_three_ranks_go_on_from_the_shards_of_two(folder: Path, longer: list[list[float | None]]) -> None:
    assert found(folder, "on three", 3) == "finished"
    close(losses(folder / "on_three"), longer)


def test_stages_are_one_process_too_and_go_on_from_shards(folder: Path, longer: list[list[float | None]]) -> None:
    assert (found(folder, "pipelined"), found(folder, "cut")) == ("finished", "finished")
    close(losses(folder / "pipelined"), losses(folder / "whole"))
    close(losses(folder / "cut"), longer)


def test_sharded_stages_are_one_process_too(folder: Path) -> None:
    assert found(folder, "two by two", 4) == "finished"
    close(losses(folder / "two_by_two"), losses(folder / "whole"))
    files = sorted(path.name[:11] for path in (folder / "two_by_two/checkpoints" / NEWEST).glob("*.safetensors"))
    assert files == [f"shard-0000{rank}" for rank in range(1, 5)]
    assert load_trained(folder / "two_by_two").step == STEPS


def test_tensor_ranks_are_one_process_too_and_go_on_from_shards(folder: Path, longer: list[list[float | None]]) -> None:
    assert (found(folder, "tensor"), found(folder, "divided")) == ("finished", "finished")
    close(losses(folder / "tensor"), losses(folder / "whole"))
    close(losses(folder / "divided"), longer)
    divided, whole = (json.loads((folder / name / "initial_parameters.json").read_text()) for name in ("tensor", "whole"))
    assert divided == whole


def test_one_process_goes_on_from_tensor_ranks(folder: Path, longer: list[list[float | None]]) -> None:
    shutil.copytree(folder / "tensor", folder / "from_tensor")
    assert train(recipe(folder, steps=LONGER), folder / "from_tensor").steps == LONGER
    close(losses(folder / "from_tensor"), longer)
    divided, whole = (load_checkpoint(folder / name / "checkpoints" / NEWEST) for name in ("tensor", "whole"))
    assert {name: one.shape for name, one in divided.optimizer.items()} == {
        name: one.shape for name, one in whole.optimizer.items()
    }


def test_sharded_streams_are_one_process_too_and_resume_bit_for_bit(folder: Path) -> None:
    assert found(folder, "stopped tensor") == ["finished", "interrupted", "finished"]
    assert losses(folder / "tensor_stopped") == losses(folder / "tensor_whole")
    train(recipe(folder, model=EARLIER_TOKENS), folder / "whole_tokens")
    close(losses(folder / "tensor_whole"), losses(folder / "whole_tokens"))


def test_sharded_tensor_ranks_are_one_process_too(folder: Path) -> None:
    assert found(folder, "tensor and shard", 4) == "finished"
    train(recipe(folder, model=FEW_HEADS), folder / "whole_heads")
    close(losses(folder / "tensor_and_shard"), losses(folder / "whole_heads"))
    divided, whole = (load_trained(folder / name).model.state_dict() for name in ("tensor_and_shard", "whole_heads"))
    torch.testing.assert_close(divided, whole, rtol=1e-4, atol=5e-6)


def test_muon_orthogonalises_whole_matrices_on_any_ranks(folder: Path) -> None:
    """Iterations in bfloat16 magnify the last digits of a gradient, which differ between sums over ranks."""
    assert found(folder, "muon") == ["finished", "interrupted", "finished", "finished"]
    assert found(folder, "muon on four", 4) == "finished"
    assert losses(folder / "muon_stopped") == losses(folder / "muon")
    same_files(folder / "muon_stopped", folder / "muon")
    train(recipe(folder, **MUON), folder / "whole_muon")
    for name in ("muon", "muon_stages"):
        close(losses(folder / name), losses(folder / "whole_muon"), rtol=1e-4)
    train(recipe(folder, **MUON_FEW_HEADS), folder / "whole_few_heads")
    close(losses(folder / "muon_on_four"), losses(folder / "whole_few_heads"), rtol=1e-4)
    kept, alone = (
        load_checkpoint(folder / name / "checkpoints" / NEWEST).optimizer for name in ("muon_on_four", "whole_few_heads")
    )
    assert {name: one.shape for name, one in kept.items()} == {name: one.shape for name, one in alone.items()}


def test_bytes_of_a_step_are_those_of_the_plan(folder: Path) -> None:
    config = recipe(folder, parallel={"shard": RANKS}, micro_batch_size=2)
    model, precision = config.decoder(256), Precision(weights=4, gradients=4)
    layout = ParallelLayout(gpus=RANKS, data=RANKS, microbatches=config.batch_size // RANKS // 2)
    setting = Setting(read_device("h100"), layout, config.batch_size, 32, precision, sharding="weights")
    planned = setting.training_step(coefficients(ModelShape.of_decoder(model), precision))["data_bytes"]
    # The plan counts parameters; a shard is as long as the longest, which fills up odd ones.
    decoder = Decoder(model)
    filled = sum(-parameter.shape[0] % RANKS * parameter[0].numel() for parameter in decoder.parameters()) * 4
    padding = layout.microbatches * 3 * filled / RANKS
    # The embedding is frozen and the last norm annealed, so no gradient of them is reduced.
    frozen = layout.microbatches * (decoder.embedding.weight.numel() + decoder.norm.gain.numel()) * 4 / RANKS
    for sent in found(folder, "counted"):
        assert sent.pop("allreduce_") < 100
        assert sum(sent.values()) == planned + padding - frozen
    assert padding < planned / 100


def test_arms_of_a_study_are_timed_by_all_ranks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state, saved, names, rounds = found(folder, "timed")
    assert (names, rounds) == (sorted(TIMED), TIMED_ROUNDS)
    monkeypatch.setattr(timing, "ROUNDS", TIMED_ROUNDS)
    alone = timing.measure({name: recipe(folder, **changes) for name, changes in TIMED.items()})
    for name in TIMED:
        # Rows of odd matrices do not divide evenly.
        assert state[name] == pytest.approx(alone.state_bytes[name] / RANKS, rel=0.02)
        assert saved[name] == pytest.approx(alone.saved_bytes[name], rel=0.1)


def test_a_gathered_checkpoint_holds_what_one_process_writes(folder: Path) -> None:
    sharded, whole = (load_checkpoint(folder / name / "checkpoints" / NEWEST) for name in ("straight", "whole"))
    assert sharded.model.keys() == whole.model.keys() and sharded.optimizer.keys() == whole.optimizer.keys()
    assert all(sharded.optimizer[name].shape == one.shape for name, one in whole.optimizer.items())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"parallel": {"shard": 5}}, "batch_size=12: must be a multiple of parallel.shard"),
        ({"parallel": {"shard": 4}}, "micro_batch_size=4: must be at most the 3 windows of a rank"),
        ({"parallel": {"shard": 2}, "compile": "model"}, "must be 'off' or 'block'"),
        ({"parallel": {"shard": 2}, "compile": "block", "recompute": "block"}, "must be 'off' with recompute='block'"),
        ({"parallel": {"pipeline": 2}, "compile": "block"}, "must be 'off' with a pipeline"),
        ({"parallel": {"pipeline": 3}, "schedule": "constant"}, "stages=3: must be at most the 2 blocks"),
        ({"parallel": {"pipeline": 2}, "micro_batch_size": 12}, "at most 6 for 2 or more micro-batches"),
        ({"parallel": {"pipeline": 2}, "micro_batch_size": 5}, "a divisor of the 12 windows"),
        ({"parallel": {"virtual": 2}}, "parallel.virtual=2: must be left out without a pipeline"),
        ({"parallel": {"shard": 0}}, "shard=0: must be >= 1"),
        ({"parallel": {"tensor": 3}}, "n_heads of attention of block 0=4: must be a multiple of parallel.tensor=3"),
        ({"parallel": {"tensor": 2, "pipeline": 2}}, "parallel.tensor=2: must be 1 with a pipeline"),
        ({"parallel": {"tensor": 2}, "compile": "block"}, "compile='block': must be 'off' with parallel.tensor=2"),
        ({"parallel": {"sequence": "tensor"}}, "parallel.sequence='tensor': must be left out without tensor ranks"),
    ],
    ids=[
        "rows",
        "micro-batch",
        "model",
        "recomputed",
        "stages",
        "blocks",
        "fill",
        "divide",
        "virtual",
        "none",
        "heads",
        "tensor stages",
        "tensor blocks",
        "sequence",
    ],
)
def test_a_layout_that_does_not_fit_is_refused_with_the_recipe(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        recipe(tmp_path, **changes)


def test_too_few_processes_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"processes=1: must be 2 as parallel has shard=2; .*torchrun --nproc-per-node 2"):
        train(recipe(tmp_path, parallel={"shard": 2}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_every_mixer_is_sharded_like_one_process() -> None:
    examples: list[DepthConfig | SequenceConfig] = [row.example(next(iter(row.examples))) for row in DEPTH]
    examples += [row.example(next(iter(row.examples))) for row in SEQUENCE]
    for config in examples:
        sharded_equals_whole.run(config)


def test_a_result_of_two_ranks_counts_tokens_once(folder: Path) -> None:
    one, other = (Result.from_data(json.loads((folder / name / "result.json").read_text())) for name in ("straight", "whole"))
    assert (one.tokens, one.target_tokens, one.parameters) == (other.tokens, other.target_tokens, other.parameters)
