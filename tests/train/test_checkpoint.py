"""Checkpoints survive damage and full disks: nothing is lost, and what happened is said in one line."""

import errno
import json
import os
import stat
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from twoaxis import CheckpointError, Decoder, DecoderConfig
from twoaxis.train import Progress, TrainConfig, load_trained, read_metrics, train
from twoaxis.train.checkpoint import (
    Checkpoint,
    checkpoint_paths,
    file_sha256,
    load_asked,
    load_checkpoint,
    load_newest,
    save_checkpoint,
)
from twoaxis.train.training_state import model_tensors, random_state, restore_model, restore_random_state

Recipe = Callable[..., TrainConfig]
Limit = Callable[[int], AbstractContextManager[None]]


class Notes(Progress):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)


def checkpoint(step: int) -> Checkpoint:
    tensors = {"weight": torch.full((300, 7), float(step)), "bias": torch.arange(5.0)}
    return Checkpoint(step, tensors, {"step/weight": torch.tensor(float(step))}, {"sampler": {"step": step}})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-7] ^= 1
    path.write_bytes(content)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def test_round_trip_keeps_values_shapes_and_dtypes(tmp_path: Path) -> None:
    model = {"a": torch.randn(3, 2), "b": torch.randn(4, dtype=torch.float64), "c": torch.randn(2).bfloat16()}
    saved = Checkpoint(7, model, {}, {"note": [1, "x", None, 0.1]})
    save_checkpoint(tmp_path, saved, keep=1)
    found = load_newest(tmp_path, say=pytest.fail)
    assert found is not None and found.step == 7 and found.state["note"] == [1, "x", None, 0.1]
    assert all(torch.equal(found.model[key], model[key]) and found.model[key].dtype == model[key].dtype for key in model)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "step-00000007").iterdir()}
    assert len(modes) == 1, "whoever may read one file of a checkpoint may read all"


def test_only_the_newest_stay_and_none_goes_before_the_new_one_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 10):
        save_checkpoint(tmp_path, checkpoint(step), keep=2)
    assert names(tmp_path) == ["step-00000002", "step-00000010"]

    rename = os.rename

    def watched(source: Path, target: Path) -> None:
        if Path(target).name == "step-00000011":
            assert names(tmp_path)[-2:] == ["step-00000002", "step-00000010"]
            assert {"model.safetensors", "optimizer.safetensors", "state.json"} == set(os.listdir(source))
        rename(source, target)

    monkeypatch.setattr(os, "rename", watched)
    save_checkpoint(tmp_path, checkpoint(11), keep=2)
    assert names(tmp_path) == ["step-00000010", "step-00000011"]


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("damage", [cut_short, flip_a_bit, empty, os.remove])
def test_the_newest_intact_one_is_used_and_the_damaged_one_is_named(
    file: str, damage: Callable[[Path], None], tmp_path: Path
) -> None:
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, checkpoint(step), keep=3)
    damage(tmp_path / "step-00000003" / file)
    said: list[str] = []
    found = load_newest(tmp_path, said.append)
    assert found is not None and found.step == 2 and torch.equal(found.model["weight"], torch.full((300, 7), 2.0))
    assert len(said) == 2 and all("\n" not in line for line in said)
    assert said[0].startswith("checkpoint step-00000003 is damaged: ") and said[0].endswith("; trying step-00000002")
    assert said[1] == "continuing from step-00000002"


def test_a_changed_number_in_the_state_is_noticed(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, checkpoint(3), keep=1) / "state.json"
    document = json.loads(path.read_text())
    document["state"]["sampler"]["step"] = 4
    path.write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match=r"checkpoint step-00000003 is damaged: state.json differs from its checksum"):
        load_checkpoint(path.parent)


def test_none_intact_is_an_error(tmp_path: Path) -> None:
    for step in (1, 2):
        save_checkpoint(tmp_path, checkpoint(step), keep=2)
        cut_short(tmp_path / f"step-0000000{step}" / "model.safetensors")
    with pytest.raises(CheckpointError, match="none of the 2 checkpoints is intact; restore one, or delete the folder"):
        load_newest(tmp_path, say=lambda line: None)


def test_no_checkpoint_at_all_is_none(tmp_path: Path) -> None:
    assert load_newest(tmp_path / "nowhere", say=pytest.fail) is None


@pytest.mark.parametrize("call", range(5))
def test_a_full_disk_leaves_earlier_checkpoints_and_no_half_files(
    call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, checkpoint(1), keep=1)
    fsync, calls = os.fsync, iter(range(100))

    def full(descriptor: int) -> None:
        if next(calls) == call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError) as caught:
        save_checkpoint(tmp_path, checkpoint(2), keep=1)
    assert str(caught.value) == (
        f"checkpoint of step 2: cannot be written to {tmp_path} (No space left on device); earlier checkpoints are intact; "
        "free space there and run again to resume"
    )
    assert not [name for name in names(tmp_path) if name.startswith(".")]
    assert load_checkpoint(tmp_path / "step-00000001").step == 1


@pytest.mark.parametrize("size", [16, 4000])
def test_a_write_the_system_refuses_is_one_line_too(size: int, tmp_path: Path, largest_file: Limit) -> None:
    save_checkpoint(tmp_path, checkpoint(1), keep=1)
    with largest_file(size), pytest.raises(CheckpointError, match="checkpoint of step 2: cannot be written") as caught:
        save_checkpoint(tmp_path, checkpoint(2), keep=1)
    assert "\n" not in str(caught.value)
    assert names(tmp_path) == ["step-00000001"]


def test_a_run_recovers_from_a_full_disk_and_from_damage(recipe: Recipe, tmp_path: Path, largest_file: Limit) -> None:
    config = recipe(steps=12, checkpoint_every=3)
    train(config, tmp_path / "whole")
    with largest_file(20_000), pytest.raises(CheckpointError, match="checkpoint of step 3: cannot be written"):
        train(config, tmp_path / "parts")
    train(config, tmp_path / "parts", should_stop=lambda: len(read_metrics(tmp_path / "parts" / "metrics.jsonl")) == 8)
    paths = checkpoint_paths(tmp_path / "parts" / "checkpoints")
    assert [path.name for path in paths] == ["step-00000008", "step-00000006"]
    flip_a_bit(paths[0] / "model.safetensors")
    notes = Notes()
    assert train(config, tmp_path / "parts", progress=notes).status == "finished"
    assert any("step-00000008 is damaged: model.safetensors differs from its checksum" in line for line in notes.lines)
    assert any(name.startswith("damaged-step-00000008") for name in names(tmp_path / "parts" / "checkpoints"))
    one, other = (
        [record._replace(seconds=0.0) for record in read_metrics(tmp_path / run / "metrics.jsonl")]
        for run in ("whole", "parts")
    )
    assert one == other
    last = [load_file(tmp_path / run / "checkpoints" / "step-00000012" / "model.safetensors") for run in ("whole", "parts")]
    assert all(torch.equal(last[0][key], last[1][key]) for key in last[0])


def test_drafts_of_killed_runs_are_removed(recipe: Recipe, tmp_path: Path) -> None:
    train(recipe(steps=4), tmp_path / "run", should_stop=lambda: True)
    draft = tmp_path / "run" / "checkpoints" / f".step-00000002.{uuid.uuid4().hex}.tmp"
    draft.mkdir()
    (draft / "model.safetensors").write_bytes(b"half")
    train(recipe(steps=4), tmp_path / "run")
    assert names(tmp_path / "run" / "checkpoints") == ["step-00000001", "step-00000004"]


def decoder(**changes: object) -> Decoder:
    data = {"vocab_size": 11, "d_model": 8, "n_layers": 1, "blocks": [[{"kind": "attention", "n_heads": 2}, "swiglu"]]}
    return Decoder.build(DecoderConfig.from_data({**data, **changes}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_layers": 2}, r"checkpoint lacks 'blocks.1.attention.\S+' \(and \d more differ\); it belongs to another model"),
        ({"d_model": 16}, r"checkpoint parameter '\S+' is float32 \[.*8.*\]; must be float32 \[.*16.*\]; use the run's own"),
        ({"tie_embeddings": False}, r"checkpoint lacks 'head.weight'; it belongs to another model"),
    ],
)
def test_another_model_is_refused_by_name(changes: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        restore_model(decoder(**changes), model_tensors(decoder()))


def test_another_dtype_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"is float32 \[.*\]; must be float64 \["):
        restore_model(decoder().double(), model_tensors(decoder()))


def test_random_state_is_restored() -> None:
    state = json.loads(json.dumps(random_state()))
    expected = torch.rand(5)
    torch.manual_seed(99)
    restore_random_state(state)
    assert torch.equal(torch.rand(5), expected)


def test_a_newer_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twoaxis.train.checkpoint.FORMAT", 3)
    save_checkpoint(tmp_path, checkpoint(1), keep=1)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="has format 3; must be 1 or 2; update twoaxis"):
        load_checkpoint(tmp_path / "step-00000001")


def test_a_trained_model_is_read_from_its_folder(recipe: Recipe, tmp_path: Path) -> None:
    train(recipe(steps=3), tmp_path / "run")
    trained = load_trained(tmp_path / "run")
    saved = load_file(tmp_path / "run" / "checkpoints" / "step-00000003" / "model.safetensors")
    assert trained.step == 3 and trained.config == recipe(steps=3) and trained.tokenizer.vocab_size == 256
    assert all(torch.equal(parameter, saved[name]) for name, parameter in trained.model.named_parameters())
    with pytest.raises(CheckpointError, match=r"cannot be read .* name a folder that `twoaxis train` has made"):
        load_trained(tmp_path / "nowhere")


def test_a_swapped_tensor_file_is_noticed(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, checkpoint(1), keep=1)
    save_file({"weight": torch.zeros(300, 7), "bias": torch.zeros(5)}, tmp_path / "step-00000001" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model.safetensors differs from its checksum"):
        load_checkpoint(tmp_path / "step-00000001")


def test_a_checkpoint_that_a_run_replaces_while_it_is_read_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replaced(path: Path) -> str:
        monkeypatch.setattr("twoaxis.train.checkpoint.file_sha256", file_sha256)
        save_checkpoint(tmp_path, checkpoint(2), keep=1)
        return file_sha256(path)

    save_checkpoint(tmp_path, checkpoint(1), keep=1)
    monkeypatch.setattr("twoaxis.train.checkpoint.file_sha256", replaced)
    found = load_asked(tmp_path)
    assert found is not None and found.step == 2


def test_a_damaged_newest_checkpoint_is_refused_unless_a_step_is_asked_for(recipe: Recipe, tmp_path: Path) -> None:
    """Catches a model of an older step that is taken for that of the run."""
    train(recipe(steps=6, checkpoint_every=2, keep_checkpoints=3), tmp_path / "run")
    flip_a_bit(tmp_path / "run" / "checkpoints" / "step-00000006" / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        load_trained(tmp_path / "run")
    assert str(caught.value) == (
        "checkpoint step-00000006 is damaged: model.safetensors differs from its checksum; restore it, or ask for "
        "step-00000004 with --step 4"
    )
    assert load_trained(tmp_path / "run", step=4).step == 4
    with pytest.raises(
        CheckpointError, match=r"step=5: must be one of a checkpoint of .*: 6, 4, 2; leave it out for the newest"
    ):
        load_trained(tmp_path / "run", step=5)
    for step in (2, 4):
        cut_short(tmp_path / "run" / "checkpoints" / f"step-0000000{step}" / "state.json")
    with pytest.raises(CheckpointError, match=r"differs from its checksum; restore it$"):
        load_trained(tmp_path / "run")
