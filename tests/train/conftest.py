"""A tiny corpus and a tiny recipe that every training test starts from."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from twoaxis.train import TrainConfig

Recipe = Callable[..., "TrainConfig"]


def made_up_text(words: int, seed: int = 0) -> str:
    """Words that repeat, so that a model has something to learn."""
    chance = random.Random(seed)
    vocabulary = ["".join(chance.choice("abcdefgh") for _ in range(chance.randint(1, 6))) for _ in range(40)]
    return " ".join(chance.choice(vocabulary) for _ in range(words))


@pytest.fixture(autouse=True)
def cache(new_cache: Path) -> None:
    del new_cache


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.txt"
    path.write_text(made_up_text(2000))
    return path


@pytest.fixture
def recipe(corpus: Path) -> Recipe:
    from twoaxis.train import TrainConfig

    def make(**changes: Any) -> TrainConfig:
        data: dict[str, Any] = {
            "model": {"d_model": 16, "n_layers": 2, "blocks": [[{"kind": "attention", "n_heads": 2}, "swiglu"]]},
            "data": {"corpus": str(corpus), "seq_len": 12},
            "batch_size": 4,
            "steps": 20,
            "validate_every": 5,
            "validation_tokens": 100,
            "checkpoint_every": 5,
            "device": "cpu",
        }
        return TrainConfig.from_data({**data, **changes})

    return make
