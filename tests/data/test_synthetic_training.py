"""A small model with the right operator solves each synthetic task within seconds."""

from pathlib import Path
from typing import Any

import pytest

from twoaxis.data.synthetic import SyntheticConfig
from twoaxis.data.synthetic.kinds import CopyConfig, EarlyFeatureConfig, MqarConfig, MultiHopConfig, SwitchingNgramConfig
from twoaxis.train import TrainConfig, train

LOOKUP = [["short_conv", {"kind": "attention", "n_heads": 1}, "swiglu"]]
"""Brings the last token to every token, then matches: one lookup a block."""

SHORT = [[{"kind": "short_swa", "n_heads": 2, "window": 8}, {"kind": "attention", "n_heads": 2}, "swiglu"]]
"""Finds a place among the last tokens, then matches or reads."""

SWITCHING = SwitchingNgramConfig(n_answers=3)

RUNS = [
    (MqarConfig(n_pairs=4, n_queries=4, n_keys=8, n_values=8), LOOKUP, 1, 32, 100, 2e-2),
    (CopyConfig(n_symbols=4, n_blanks=3, n_letters=8), SHORT, 2, 32, 130, 1e-2),
    (SWITCHING, SHORT, 1, 64, 200, 1e-2),
    (EarlyFeatureConfig(n_letters=8, n_entries=3, n_queries=3), LOOKUP, 2, 32, 200, 2e-2),
    (MultiHopConfig(n_nodes=3, n_names=8, n_queries=4), LOOKUP, 2, 64, 260, 2e-2),
]


def accuracy(
    task: SyntheticConfig, blocks: list[list[Any]], n_layers: int, rows: int, steps: int, lr: float, run: Path
) -> float:
    config = TrainConfig.from_data(
        {
            "model": {"d_model": 32, "n_layers": n_layers, "blocks": blocks, "max_seq_len": task.sample_length},
            "data": {
                "corpus": task.replace(n_train=125 * rows, n_validation=200),
                "seq_len": task.sample_length,
                "packing": "joined",
            },
            "optimizer": {"lr": lr},
            "batch_size": rows,
            "steps": steps,
            "validate_every": steps,
            "checkpoint_every": steps,
            "device": "cpu",
        }
    )
    found = train(config, run).validation_accuracy
    assert found is not None
    return found


@pytest.mark.parametrize(("task", "blocks", "n_layers", "rows", "steps", "lr"), RUNS, ids=[run[0].source.name for run in RUNS])
def test_a_model_with_the_right_operator_solves_it(
    task: SyntheticConfig,
    blocks: list[list[Any]],
    n_layers: int,
    rows: int,
    steps: int,
    lr: float,
    tmp_path: Path,
) -> None:
    assert accuracy(task, blocks, n_layers, rows, steps, lr, tmp_path / "run") > 0.95


def test_one_attention_alone_does_not_solve_two_local_steps(tmp_path: Path) -> None:
    blocks = [[{"kind": "attention", "n_heads": 2}, "swiglu"]]
    assert accuracy(SWITCHING, blocks, 1, 64, 200, 1e-2, tmp_path / "run") < 0.6
