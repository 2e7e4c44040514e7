"""What cannot be trained says so in one line, before the first step wherever that is possible."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from twoaxis import ConfigError, DataError
from twoaxis.train import Progress, RunFolder, TrainConfig, read_metrics, train
from twoaxis.train.trainer import Trainer, Validation

Recipe = Callable[..., TrainConfig]
MODEL: dict[str, Any] = {"d_model": 16, "n_layers": 1, "blocks": [[{"kind": "attention", "n_heads": 2}, "swiglu"]]}


class Notes(Progress):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stepz": 3}, r"unknown key 'stepz' in the recipe; did you mean 'steps'\?"),
        ({"model": {"d_model": 16}}, "model: n_layers is missing in the model"),
        ({"model": {**MODEL, "depth": "residul"}}, r"unknown depth mixer 'residul'; did you mean 'residual'\?"),
        ({"model": "big"}, "model='big': must be a table"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"micro_batch_size": 5}, "micro_batch_size=5: must be at most batch_size=4; lower it, or leave it out"),
        ({"model": {**MODEL, "max_seq_len": 8}}, "data.seq_len=12: must be at most model.max_seq_len=8; raise it or cut"),
        ({"device": "gpu0"}, "device='gpu0': must be auto, cpu, cuda or cuda:N; use auto"),
        ({"precision": "fp8"}, "precision='fp8'"),
        ({"optimizer": {"betas": [0.9, 1.0]}}, r"optimizer: .*betas=\(0.9, 1.0\): must be at least 0 and below 1"),
        ({"optimizer": {"learning_rate": 1}}, "learning_rate"),
    ],
)
def test_a_recipe_that_cannot_be(changes: dict[str, Any], message: str, recipe: Recipe) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        recipe(**changes)
    assert "\n" not in str(caught.value)


def test_a_vocabulary_smaller_than_the_tokenizer(recipe: Recipe, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.vocab_size=100: must be at least the tokenizer's 256; leave it out"):
        train(recipe(model={**MODEL, "vocab_size": 100}), tmp_path / "run")


def test_a_larger_vocabulary_is_padded(recipe: Recipe, tmp_path: Path) -> None:
    result = train(recipe(steps=1, model={**MODEL, "vocab_size": 320}), tmp_path / "padded")
    plain = train(recipe(steps=1, model=MODEL), tmp_path / "plain")
    assert result.parameters == plain.parameters + 64 * 16


def test_a_device_that_is_not_here(recipe: Recipe, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"device='cuda:99': cannot be used here \(.*\); use device=auto"):
        train(recipe(device="cuda:99"), tmp_path / "run")


def test_a_validation_without_targets_is_an_error(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twoaxis.data.batch.Batch.n_targets", property(lambda batch: 0))
    with pytest.raises(DataError, match="validation has no valid target: every next token belongs to another document"):
        train(recipe(), tmp_path / "run")


def test_batches_without_targets_are_said_once_and_do_no_harm(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from twoaxis.data import Batch, PackedSampler
    from twoaxis.ops.cross_entropy import IGNORE

    real = PackedSampler.next

    def masked(sampler: PackedSampler) -> Batch:
        batch = real(sampler)
        batch.targets.fill_(IGNORE)
        return batch

    monkeypatch.setattr(PackedSampler, "next", masked)
    notes = Notes()
    result = train(recipe(steps=3, validate_every=3), tmp_path / "run", progress=notes)
    assert result.status == "finished" and result.target_tokens == 0 and result.tokens == 3 * 4 * 12
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [(record.loss, record.grad_norm, record.tokens) for record in records] == [(0.0, 0.0, 0)] * 3
    assert result.validation_loss is not None and 0 < result.validation_loss < 7
    assert len([line for line in notes.lines if "no token of the batch carries a loss" in line]) == 1


def test_a_run_that_diverges_stops_and_says_so(recipe: Recipe, tmp_path: Path) -> None:
    notes = Notes()
    wild = recipe(optimizer={"lr": 1e30, "clip_norm": None}, schedule={"kind": "constant", "warmup_steps": 0})
    result = train(wild, tmp_path / "run", progress=notes)
    assert result.status == "diverged" and result.steps < 20
    assert result.message.startswith(f"diverged at step {result.steps}: ") and "\n" not in result.message
    assert "must be finite; lower optimizer.lr or warm up for longer; the last checkpoint is of step 0" in result.message
    assert any(result.message in line for line in notes.lines)
    assert RunFolder(tmp_path / "run").result == result
    assert train(wild, tmp_path / "run") == result


def test_a_validation_without_a_number_is_written_down(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON has no NaN, so that such a run once ended in a trace and without a result."""
    monkeypatch.setattr(Trainer, "validate", lambda self: Validation(math.nan, math.inf, 3))
    result = train(recipe(steps=3, validate_every=2), tmp_path / "run")
    assert (result.status, result.steps, result.validation_loss, result.bpb) == ("diverged", 2, None, None)
    assert "diverged at step 2: validation loss nan: must be finite" in result.message
    assert RunFolder(tmp_path / "run").result == result
