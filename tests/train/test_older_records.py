"""A run folder that an older version has recorded is loaded, compared and resumed as it was trained."""

import json
from pathlib import Path

import pytest
import torch

from twoaxis.core.errors import CheckpointError
from twoaxis.train import load_trained, read_recipe, train
from twoaxis.train.metrics import read_metrics
from twoaxis.train.recipe import TrainConfig
from twoaxis.train.run_folder import RunFolder

RECORD = Path(__file__).with_name("records") / "residual_scalars.json"
"""As it was written when residual scalars had no options, always added the raw embedding, and embeddings began at 0.02."""


def _recipe(embedding: str, std: float | None = 0.02) -> TrainConfig:
    data = json.loads(RECORD.read_text())
    data["model"]["depth"] = {"kind": "residual_scalars", "embedding": embedding}
    data["model"]["embedding_std"] = std
    return TrainConfig.from_data(data)


def _losses(folder: Path) -> list[float]:
    return [record.loss for record in read_metrics(folder / "metrics.jsonl")]


def _older(folder: Path) -> None:
    """Makes the folder of a run with the raw embedding one that an older version has left."""
    RunFolder(folder).write("config", json.loads(RECORD.read_text()))


@pytest.fixture(autouse=True)
def beside_the_corpus(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(corpus.parent)


def test_the_record_lacks_what_came_later() -> None:
    model = json.loads(RECORD.read_text())["model"]
    assert model["depth"] == {"kind": "residual_scalars"} and "embedding_std" not in model


def test_a_run_of_an_older_version_goes_on_to_the_same_losses(tmp_path: Path) -> None:
    train(_recipe("raw"), tmp_path / "whole")
    stopped = tmp_path / "stopped"
    train(_recipe("raw"), stopped, should_stop=iter([False] * 7 + [True] * 9).__next__)
    _older(stopped)
    assert RunFolder(stopped).config == read_recipe(stopped / "config.json") == _recipe("raw")
    train(read_recipe(stopped / "config.json"), stopped)
    assert _losses(stopped) == _losses(tmp_path / "whole")
    ours, theirs = (load_trained(folder).model.state_dict() for folder in (stopped, tmp_path / "whole"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert load_trained(stopped).model.config.depth.to_data()["embedding"] == "raw"


def test_the_default_of_today_is_another_recipe(tmp_path: Path) -> None:
    train(_recipe("raw"), tmp_path / "run", should_stop=lambda: True)
    _older(tmp_path / "run")
    RunFolder(tmp_path / "run").check(_recipe("raw"))
    with pytest.raises(CheckpointError, match=r"model\.depth\.embedding='raw' there, 'normalised' in this recipe"):
        train(_recipe("normalised"), tmp_path / "run")


def test_a_recipe_is_no_record(tmp_path: Path) -> None:
    """The same text in a file of the user's has the defaults of today, and so does another mixer by an override."""
    (tmp_path / "config.json").write_text(RECORD.read_text())
    assert read_recipe(tmp_path / "config.json") == _recipe("normalised", std=None)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert read_recipe(tmp_path / "config.json") == _recipe("raw")
    found = read_recipe(tmp_path / "config.json", ["model.depth.embedding=normalised", "steps=3"])
    assert found == _recipe("normalised").replace(steps=3)
