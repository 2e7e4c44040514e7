"""Precision and recomputation change how a step is computed, not what it computes."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from twoaxis.train import RunFolder, TrainConfig, read_metrics, train
from twoaxis.train.token_loss import choose_dtype

Recipe = Callable[..., TrainConfig]


def losses(run: Path) -> list[float]:
    return [record.loss for record in read_metrics(run / "metrics.jsonl")]


def test_recomputing_blocks_changes_nothing(recipe: Recipe, tmp_path: Path) -> None:
    for recompute in ("off", "block"):
        train(recipe(steps=3, recompute=recompute), tmp_path / recompute)
    assert losses(tmp_path / "off") == losses(tmp_path / "block")


def test_bfloat16_is_close_and_keeps_float32_parameters(recipe: Recipe, tmp_path: Path) -> None:
    for precision in ("float32", "bfloat16"):
        train(recipe(steps=3, precision=precision), tmp_path / precision)
    wide, narrow = losses(tmp_path / "float32"), losses(tmp_path / "bfloat16")
    assert wide != narrow
    torch.testing.assert_close(narrow, wide, rtol=1e-2, atol=0.0)
    saved = load_file(tmp_path / "bfloat16" / "checkpoints" / "step-00000003" / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    assert RunFolder(tmp_path / "bfloat16").read("env")["precision"] == "bfloat16"


@pytest.mark.parametrize(("device", "expected"), [("cpu", torch.float32), ("cuda", torch.bfloat16)])
def test_automatic_precision_follows_the_device(device: str, expected: torch.dtype) -> None:
    assert choose_dtype("auto", torch.device(device)) == expected
