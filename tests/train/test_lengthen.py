"""A run is made longer where that is the run that would have been as long from the start, and is refused elsewhere."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from twoaxis import CheckpointError, ConfigError, DataError
from twoaxis.train import Progress, RunFolder, TrackedRun, TrainConfig, read_metrics, train

Recipe = Callable[..., TrainConfig]
CONSTANT = {"kind": "constant", "warmup_steps": 2}
WSD = {"kind": "wsd", "warmup_steps": 2, "decay_fraction": 0.25}


class Notes(Progress):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)


def losses(run: Path) -> list[float]:
    return [record.loss for record in read_metrics(run / "metrics.jsonl")]


def test_a_finished_run_with_more_steps_ends_like_one_as_long_from_the_start(recipe: Recipe, tmp_path: Path) -> None:
    """Catches a run that is refused, read as finished, or continued with other data or learning rates."""
    assert train(recipe(schedule=CONSTANT, steps=6), tmp_path / "run").steps == 6
    notes = Notes()
    longer = recipe(schedule=CONSTANT, steps=9)
    result = train(longer, tmp_path / "run", progress=notes)
    train(longer, tmp_path / "whole")
    assert result.steps == 9 and result.status == "finished" and RunFolder(tmp_path / "run").config == longer
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    last = [load_file(tmp_path / run / "checkpoints" / "step-00000009" / "model.safetensors") for run in ("run", "whole")]
    assert all(torch.equal(last[0][name], last[1][name]) for name in last[0])
    assert any(line.endswith("goes on after step 6 to step 9, instead of 6") for line in notes.lines)


def test_a_run_that_has_not_begun_to_decay_goes_on(recipe: Recipe, tmp_path: Path) -> None:
    train(recipe(schedule=WSD, steps=12), tmp_path / "run", should_stop=lambda: len(losses(tmp_path / "run")) == 8)
    longer = recipe(schedule=WSD, steps=16)
    assert train(longer, tmp_path / "run").steps == 16
    train(longer, tmp_path / "whole")
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


@pytest.mark.parametrize(
    ("schedule", "step"),
    [({"kind": "cosine", "warmup_steps": 2}, 4), (WSD, 6), ({"kind": "constant", "warmup_steps": None}, 1)],
)
def test_steps_with_another_learning_rate_are_refused_and_nothing_changes(
    schedule: dict[str, Any], step: int, recipe: Recipe, tmp_path: Path
) -> None:
    """Catches a schedule that jumps without a word, and a result that is lost to a refusal."""
    train(recipe(schedule=schedule, steps=6), tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    kind = schedule["kind"]
    message = (
        f"steps=6 there, 60 in this recipe: must be equal, since step {step} of 6 taken has another learning rate in the longer"
    )
    with pytest.raises(CheckpointError, match=f"{message} {kind} schedule"):
        train(recipe(schedule=schedule, steps=60), tmp_path / "run")
    assert before == {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}


@pytest.mark.parametrize("changes", [{"steps": 4}, {"steps": 9, "seed": 1}])
def test_fewer_steps_and_other_changes_are_refused_as_before(changes: dict[str, Any], recipe: Recipe, tmp_path: Path) -> None:
    train(recipe(schedule=CONSTANT, steps=6), tmp_path / "run")
    with pytest.raises(
        CheckpointError, match=r"there, \d in this recipe: must be equal to resume; use the recipe of the folder"
    ):
        train(recipe(**{"schedule": CONSTANT, **changes}), tmp_path / "run")


def test_a_process_killed_between_recipe_and_result_is_made_good(recipe: Recipe, tmp_path: Path) -> None:
    train(recipe(schedule=CONSTANT, steps=6), tmp_path / "run")
    longer = recipe(schedule=CONSTANT, steps=9)
    (tmp_path / "run" / "config.json").write_text(json.dumps(longer.to_data()))
    assert train(longer, tmp_path / "run").steps == 9


def test_what_cannot_go_on_stays_finished(recipe: Recipe, tmp_path: Path) -> None:
    """The shorter run once lost its result, and its recipe, before the corpus was looked at."""
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("one line of a small text\n" * 200)
    shorter = recipe(schedule=CONSTANT, steps=4, data={"corpus": str(corpus), "seq_len": 16})
    result = train(shorter, tmp_path / "run")
    corpus.rename(tmp_path / "moved.txt")
    with pytest.raises(DataError, match="must be an existing file"):
        train(shorter.replace(steps=8), tmp_path / "run")
    (tmp_path / "moved.txt").rename(corpus)
    assert train(shorter, tmp_path / "run") == result
    assert train(shorter.replace(steps=8), tmp_path / "run").steps == 8


def change_corpus(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text(corpus.read_text().replace("a", "b"))


def damage_checkpoints(tmp_path: Path) -> None:
    for path in (tmp_path / "run" / "checkpoints").glob("step-*"):
        (path / "model.safetensors").write_bytes(b"")


def remove_checkpoints(tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "run" / "checkpoints")


class NeverStarts:
    def start(self, run: TrackedRun) -> None:
        assert run.config["steps"] == 8, "a tracker is given the longer recipe"
        raise OSError("no login")

    def log(self, step: int, tokens: int, values: object) -> None:
        pytest.fail("it has not started")

    def finish(self, result: object) -> None:
        pytest.fail("it has not started")


@pytest.mark.parametrize(
    ("spoil", "trackers", "error", "message"),
    [
        (change_corpus, [], CheckpointError, "^corpus: .*: must be equal to resume; restore the corpus"),
        (damage_checkpoints, [], CheckpointError, "none of the 1 checkpoints is intact"),
        (
            remove_checkpoints,
            [],
            CheckpointError,
            "has the result of 4 steps and no checkpoint: must have one",
        ),
        (lambda _: None, [NeverStarts()], ConfigError, r"cannot be started \(OSError: no login\)"),
    ],
    ids=["other corpus", "damaged checkpoints", "no checkpoints", "tracker"],
)
def test_a_refusal_leaves_the_finished_run_as_it_is(
    spoil: Callable[[Path], None],
    trackers: list[NeverStarts],
    error: type[Exception],
    message: str,
    recipe: Recipe,
    tmp_path: Path,
) -> None:
    """The finished run once lost its result and its recipe, or was trained again from the first step."""
    shorter = recipe(schedule=CONSTANT, steps=4)
    result = train(shorter, tmp_path / "run")
    spoil(tmp_path)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(error, match=message):
        train(shorter.replace(steps=8), tmp_path / "run", trackers=trackers)
    assert before == {path: path.read_bytes() for path in before}
    assert train(shorter, tmp_path / "run") == result


def test_a_run_that_shares_its_files_leaves_those_of_the_other(recipe: Recipe, tmp_path: Path) -> None:
    """Studies take over runs of others by hard links."""
    train(recipe(schedule=CONSTANT, steps=4), tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "other", copy_function=os.link)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    train(recipe(schedule=CONSTANT, steps=6), tmp_path / "other")
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before
    assert len(losses(tmp_path / "other")) == 6
