"""Running, resuming and surviving: every run in its own process, none of which can take the study with it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from twoaxis.core.errors import StudyError
from twoaxis.study import StudyConfig
from twoaxis.study.folder import Place, StudyFolder, places
from twoaxis.study.progress import Forecast, PlainStudyProgress
from twoaxis.study.runner import LineCount, train_command

from .scripted import FAKE, FakeTrainer


def test_runs_every_arm_and_seed_in_rotating_order(trainer: FakeTrainer) -> None:
    records = trainer.run()
    assert {record.status for record in records.values()} == {"finished"}
    assert trainer.order == [
        *("plain/0", "delta/0", "local/0"),
        *("delta/1", "local/1", "plain/1"),
        *("local/2", "plain/2", "delta/2"),
    ]
    assert [str(place) for place in records] == [name.replace("/", " seed ") for name in trainer.order]
    assert records[Place("plain", 0)].curve == ((128, pytest.approx(5 + 4 / 6)), (256, pytest.approx(5 + 2 / 6)), (384, 5.0))


def test_a_second_call_runs_nothing(trainer: FakeTrainer) -> None:
    first = trainer.run()
    before = {path: path.stat().st_mtime_ns for path in trainer.folder.rglob("*") if path.is_file()}
    assert trainer.run() == first
    assert len(trainer.order) == 9
    assert {path: path.stat().st_mtime_ns for path in trainer.folder.rglob("*") if path.is_file()} == before


def test_a_killed_run_is_recorded_and_resumed_next_time(trainer: FakeTrainer) -> None:
    trainer.actions["delta/1"] = ["kill"]
    record = trainer.run()[Place("delta", 1)]
    assert (record.status, record.message) == ("failed", "killed by SIGKILL: half way")
    assert len(trainer.order) == 9, "the others go on"
    assert StudyFolder(trainer.folder).record(Place("plain", 1)).status == "finished"
    record = trainer.run()[Place("delta", 1)]
    assert record.status == "finished"
    assert trainer.order[9:] == ["delta/1"], "finished runs are kept"
    assert not StudyFolder(trainer.folder).failure(Place("delta", 1)).exists()
    assert len((trainer.folder / "runs/delta/seed-1/metrics.jsonl").read_text().splitlines()) == 6


def test_bad_input_keeps_the_last_line_of_standard_error(trainer: FakeTrainer) -> None:
    trainer.actions["local/0"] = ["bad input"]
    record = trainer.run()[Place("local", 0)]
    assert record.message == "ended with exit code 2: ConfigError: d_model=7: must be even; add 1"


def test_a_diverged_run_is_an_outcome_and_not_run_again(trainer: FakeTrainer) -> None:
    trainer.actions["delta/0"] = ["diverge"]
    record = trainer.run()[Place("delta", 0)]
    assert (record.status, record.message, record.loss) == ("diverged", "diverged at step 3: loss nan", None)
    trainer.run()
    assert len(trainer.order) == 9


CHANGES: list[tuple[str, dict[str, Any], str]] = [
    ("more replicates", {"replicates": [0, 1, 2, 3]}, "replicates="),
    ("another budget", {"budget": {"steps": 7}}, "budget.steps=6 there, 7 in"),
    ("another rule", {"decision": {"smallest_effect": 0.5}}, "decision.smallest_effect=0.05 there, 0.5 in"),
]


@pytest.mark.parametrize(("change", "message"), [case[1:] for case in CHANGES], ids=[case[0] for case in CHANGES])
def test_refuses_a_changed_study(
    trainer: FakeTrainer, study_data: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    trainer.run()
    with pytest.raises(StudyError, match=rf"{message}.*run in a new folder"):
        trainer.run(StudyConfig.from_data(study_data | change))
    assert len(trainer.order) == 9


def test_refuses_a_run_made_with_another_recipe(trainer: FakeTrainer) -> None:
    trainer.run()
    path = trainer.folder / "runs/local/seed-1/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"batch_size": 8}))
    with pytest.raises(StudyError, match=r"local seed 1: .*batch_size=8 there, 4 in this recipe"):
        trainer.run()


def test_refuses_a_second_process(trainer: FakeTrainer) -> None:
    with StudyFolder(trainer.folder).locked(), pytest.raises(StudyError, match="another process runs it"):
        trainer.run()


def test_refuses_a_folder_that_cannot_be_made(trainer: FakeTrainer) -> None:
    trainer.folder.write_text("a file")
    with pytest.raises(StudyError, match=r"study folder .*cannot be written"):
        trainer.run()


PROGRAM = """
import sys
from pathlib import Path
from twoaxis.study import StudyConfig
from twoaxis.study.progress import PlainStudyProgress
from twoaxis.study.runner import run_study
fake, script, study, folder = sys.argv[1:]
command = lambda recipe, run: [sys.executable, "-I", "-S", fake, script, str(recipe), str(run)]
import json
run_study(StudyConfig.from_data(json.loads(Path(study).read_text())), folder, command=command, progress=PlainStudyProgress())
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_everything_resumable(trainer: FakeTrainer, tmp_path: Path, number: int) -> None:
    trainer.step_seconds = 0.5
    trainer.command()
    (tmp_path / "study.json").write_text(json.dumps(trainer.study.to_data()))
    arguments = [str(FAKE), str(trainer.script), str(tmp_path / "study.json"), str(trainer.folder)]
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, *arguments], stderr=subprocess.PIPE, text=True)
    metrics = trainer.folder / "runs/plain/seed-0/metrics.jsonl"
    while not (metrics.exists() and metrics.stat().st_size):
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
    os.kill(process.pid, number)
    said = process.communicate()[1]
    assert "KeyboardInterrupt" in said
    assert "run 1 of 9: plain seed 0" in said
    record = StudyFolder(trainer.folder).record(Place("plain", 0))
    assert record.status == "partial"
    steps = len(metrics.read_text().splitlines())
    assert f"after step {steps}" in record.message
    assert trainer.order == ["plain/0"]
    log = StudyFolder(trainer.folder).log(Place("plain", 0)).read_text()
    assert f"stopped after step {steps}, which is saved" in log, "the run was asked, not killed"

    trainer.step_seconds = 0.0
    records = trainer.run()
    assert {record.status for record in records.values()} == {"finished"}
    assert trainer.order[:3] == ["plain/0", "plain/0", "delta/0"]


def test_an_interrupted_study_has_complete_pairs(study: StudyConfig) -> None:
    order = places(study)
    for end in range(3, len(order) + 1, 3):
        arms = {place.seed: {other.arm for other in order[:end] if other.seed == place.seed} for place in order[:end]}
        assert all(names == set(study.arms) for names in arms.values())


def test_the_command_line_of_a_run() -> None:
    command = train_command(Path("recipe.json"), Path("run"))
    assert command == [sys.executable, "-m", "twoaxis", "train", "recipe.json", "--run", "run"]


def test_counts_lines_of_a_growing_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = LineCount(path)
    assert lines.count() == 0
    path.write_text("a\nb\nhalf")
    assert lines.count() == 2
    path.write_text("a\nb\nhalf done\n")
    assert lines.count() == 3
    path.write_text("a\n")
    assert lines.count() == 1


def test_progress_tells_rate_and_time_left(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    progress = PlainStudyProgress(every_seconds=10)
    progress.start(total_runs=4, finished_runs=1, steps=100, tokens_per_step=64)
    progress.begin(Place("delta", 0), 0)
    for now, step in ((5.0, 1), (15.0, 21)):
        clock[0] = now
        progress.step(step)
    # 20 steps of 64 tokens in the 10 s after the start-up; 279 of 300 steps are left at 21 in 15 s.
    assert "delta seed 0: step 21 of 100  128 tokens/s  about 3:19 left for the study" in capsys.readouterr().err


def test_forecast_before_the_first_step() -> None:
    forecast = Forecast(total_runs=2, finished_runs=0, steps=10, tokens_per_step=64)
    forecast.begin(0)
    assert forecast.words() == "starting"
