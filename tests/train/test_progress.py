"""Progress goes to standard error: a bar on a terminal, plain lines elsewhere."""

import io
from pathlib import Path

import pytest

from twoaxis.ops.cpu import library
from twoaxis.train import PlainProgress, Progress, RichProgress, StepRecord, console_progress, train
from twoaxis.train.progress import Pace, StagePace

from ..fresh import run_fresh
from .conftest import Recipe


def record(step: int, validation_loss: float | None = None) -> StepRecord:
    return StepRecord(step, 2.5, 1.0, 0.1, 100, 0.5, validation_loss)


def play(progress: Progress) -> None:
    progress.preparing("encoding", 50, 100)
    progress.start(0, 4, 128)
    for step in range(1, 5):
        progress.step(record(step, 2.25 if step == 2 else None))
    progress.note("all [bold]done")
    progress.stop()


def test_plain_lines_only_when_there_is_something_to_say() -> None:
    stream = io.StringIO()
    play(PlainProgress(stream, every_seconds=1e9))
    assert stream.getvalue().splitlines() == [
        "training: step 0 of 4",
        "step 2 of 4: loss 2.5000  validation 2.2500  256 tokens/s  0:01 left",
        "step 4 of 4: loss 2.5000  validation 2.2500  256 tokens/s  0:00 left",
        "all [bold]done",
    ]


def test_plain_lines_come_when_they_are_due() -> None:
    stream = io.StringIO()
    play(PlainProgress(stream, every_seconds=0.0))
    lines = stream.getvalue().splitlines()
    assert lines[0] == "encoding: 50%" and len([line for line in lines if line.startswith("step ")]) == 4


def test_a_bar_shows_loss_speed_and_time_left(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    play(RichProgress())
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "4/4  loss 2.5000  validation 2.2500  256 tokens/s  0:00 left" in captured.err
    assert "all [bold]done" in captured.err


def test_a_bar_goes_with_its_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """It once stood at 100 % while kernels were compiled."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    progress = RichProgress()
    progress.preparing("encoding", 50, 100)
    assert [task.description for task in progress._bar.tasks] == ["encoding"]
    progress.preparing("encoding", 100, 100)
    assert not progress._bar.tasks
    progress.start(0, 4, 128)
    assert [task.description for task in progress._bar.tasks] == ["training"]
    progress.stop()


@pytest.mark.parametrize(
    ("due", "status", "said"),
    [
        (False, "on", []),
        (True, "on", ["compiles kernels for this processor, once"]),
        (
            True,
            "off: cc fails",
            ["compiles kernels for this processor, once", "kernels are off: cc fails; PyTorch computes the same"],
        ),
    ],
)
def test_a_run_that_builds_kernels_says_so(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, due: bool, status: str, said: list[str]
) -> None:
    monkeypatch.setattr(library, "must_compile", lambda: due)
    monkeypatch.setattr(library, "status", lambda: status)
    stream = io.StringIO()
    train(recipe(steps=1), tmp_path / "run", PlainProgress(stream))
    assert [line for line in stream.getvalue().splitlines() if line.startswith(("compiles kernels", "kernels are"))] == said


def test_no_terminal_means_plain_lines() -> None:
    assert isinstance(console_progress(), PlainProgress)


def test_time_left_counts_only_steps_to_come() -> None:
    pace = Pace(90, 100, 10)
    pace.add(record(91))
    assert "0:04 left" in pace.words(record(91)) and "20 tokens/s" in pace.words(record(91))


def test_a_stage_of_preparation_has_a_rate_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 0.0, 10.0, 20.0, 20.0])
    monkeypatch.setattr("time.monotonic", lambda: next(times))
    pace = StagePace()
    assert pace.words("encoding", 100, 1000) == "10%"
    assert pace.words("encoding", 100, 1000) == "10%"
    assert pace.words("encoding", 600, 1000) == "60%  50/s  0:08 left"
    assert pace.words("scoring", 1, 4) == "25%"
    assert pace.words("scoring", 2, 4) == "50%"


def test_what_is_less_than_asked_for_is_said(recipe: Recipe, corpus: Path, tmp_path: Path) -> None:
    notes: list[str] = []
    progress = Progress()
    progress.note = notes.append  # type: ignore[method-assign]
    data = {"corpus": str(corpus), "tokenizer": {"kind": "bpe", "vocab_size": 5000}, "seq_len": 12}
    train(recipe(steps=1, validation_tokens=10_000, data=data), tmp_path / "one", progress)
    assert any(note.startswith("the tokenizer has ") and note.endswith("where vocab_size=5,000") for note in notes)
    [said] = [note for note in notes if note.startswith("validation_tokens=10,000: the validation text has ")]
    assert said.endswith(" tokens in whole windows; all of them are read")
    notes.clear()
    train(recipe(steps=1, validation_tokens=100), tmp_path / "two", progress)
    assert not any(note.startswith("validation_tokens") for note in notes)


def test_training_does_not_load_rich() -> None:
    code = "import sys, twoaxis.train; sys.exit('rich' in sys.modules or 'tokenizers' in sys.modules)"
    assert run_fresh(code).returncode == 0
