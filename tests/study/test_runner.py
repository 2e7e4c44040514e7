"""Running, resuming and surviving: every run in its own process, none of which can take the study with it."""

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from random import Random
from typing import Any

import pytest

from twoaxis.core.errors import ConfigError, StudyError
from twoaxis.study import StudyConfig
from twoaxis.study.design.rules import TuningConfig
from twoaxis.study.planning import plan_study
from twoaxis.study.report import read_study_folder
from twoaxis.study.report_data import ReportData
from twoaxis.study.running import next_rate, run_study, train_command
from twoaxis.study.running.engine import LocalEngine, launched
from twoaxis.study.running.study_folder import RunKey, StudyFolder, run_keys
from twoaxis.study.running.study_progress import Forecast, LineCount, PlainStudyProgress

from .scripted import FakeTrainer, fake_timer


def test_runs_every_arm_and_seed_in_rotating_order(trainer: FakeTrainer) -> None:
    records = trainer.run()
    assert {record.status for record in records.values()} == {"finished"}
    assert trainer.order == [
        *("plain/0", "delta/0", "local/0"),
        *("delta/1", "local/1", "plain/1"),
        *("local/2", "plain/2", "delta/2"),
    ]
    assert [str(key) for key in records] == [name.replace("/", " seed ") for name in trainer.order]
    assert records[RunKey("plain", 0)].curve == ((128, pytest.approx(5 + 4 / 6)), (256, pytest.approx(5 + 2 / 6)), (384, 5.0))


def test_a_second_call_runs_nothing(trainer: FakeTrainer) -> None:
    first = trainer.run()
    before = {path: path.stat().st_mtime_ns for path in trainer.folder.rglob("*") if path.is_file()}
    assert trainer.run() == first
    assert len(trainer.order) == 9
    assert {path: path.stat().st_mtime_ns for path in trainer.folder.rglob("*") if path.is_file()} == before


def test_a_killed_run_is_recorded_and_resumed_next_time(trainer: FakeTrainer) -> None:
    trainer.actions["delta/1"] = ["kill"]
    record = trainer.run()[RunKey("delta", 1)]
    assert (record.status, record.message) == ("failed", "killed by SIGKILL: half way")
    assert len(trainer.order) == 9, "the others go on"
    assert StudyFolder(trainer.folder).record(RunKey("plain", 1)).status == "finished"
    record = trainer.run()[RunKey("delta", 1)]
    assert record.status == "finished"
    assert trainer.order[9:] == ["delta/1"], "finished runs are kept"
    assert not StudyFolder(trainer.folder).failure(RunKey("delta", 1)).exists()
    assert len((trainer.folder / "runs/delta/seed-1/metrics.jsonl").read_text().splitlines()) == 6


def test_bad_input_keeps_the_last_line_of_standard_error(trainer: FakeTrainer) -> None:
    trainer.actions["local/0"] = ["bad input"]
    record = trainer.run()[RunKey("local", 0)]
    assert record.message == "ended with exit code 2: ConfigError: d_model=7: must be even; add 1"


def test_a_diverged_run_is_an_outcome_and_not_run_again(trainer: FakeTrainer) -> None:
    trainer.actions["delta/0"] = ["diverge"]
    record = trainer.run()[RunKey("delta", 0)]
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
    finished: FakeTrainer, study_data: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(StudyError, match=rf"{message}.*run in a new folder"):
        finished.run(StudyConfig.from_data(study_data | change))
    assert len(finished.order) == 9


def test_refuses_a_run_made_with_another_recipe(finished: FakeTrainer) -> None:
    path = finished.folder / "runs/local/seed-1/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"batch_size": 8}))
    with pytest.raises(StudyError, match=r"local seed 1: .*batch_size=8 there, 4 in this recipe"):
        finished.run()


def test_refuses_a_second_process(trainer: FakeTrainer) -> None:
    with StudyFolder(trainer.folder).locked(), pytest.raises(StudyError, match="another process runs it"):
        trainer.run()


def test_refuses_a_folder_that_cannot_be_made(trainer: FakeTrainer) -> None:
    trainer.folder.write_text("a file")
    with pytest.raises(StudyError, match=r"study folder .*cannot be written"):
        trainer.run()


def start(trainer: FakeTrainer, folder: Path, said: Path) -> int:
    """Runs the study in a fork, which has everything loaded and so begins at once; returns its process id."""
    command = trainer.command()
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        # A shell that runs tests in the background lets them ignore it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with open(said, "a", buffering=1) as sys.stderr:
            try:
                run_study(trainer.study, folder, command=command, progress=PlainStudyProgress(), timer=fake_timer)
                status = 0
            except BaseException:
                traceback.print_exc()
    finally:
        os._exit(status)


def status_of(child: int) -> int:
    """Waits for a fork; returns its exit code, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_everything_resumable(trainer: FakeTrainer, tmp_path: Path, number: int) -> None:
    trainer.step_seconds = 0.5
    child = start(trainer, trainer.folder, tmp_path / "said.txt")
    metrics = trainer.folder / "runs/plain/seed-0/metrics.jsonl"
    while not (metrics.exists() and metrics.stat().st_size):
        assert os.waitpid(child, os.WNOHANG) == (0, 0), (tmp_path / "said.txt").read_text()
        time.sleep(0.05)
    os.kill(child, number)
    assert status_of(child) == 1
    said = (tmp_path / "said.txt").read_text()
    assert "KeyboardInterrupt" in said
    assert "run 1 of 9: plain seed 0" in said
    record = StudyFolder(trainer.folder).record(RunKey("plain", 0))
    assert record.status == "partial"
    steps = len(metrics.read_text().splitlines())
    assert f"after step {steps}" in record.message
    assert trainer.order == ["plain/0"]
    log = StudyFolder(trainer.folder).log(RunKey("plain", 0)).read_text()
    assert f"stopped after step {steps}, which is saved" in log, "the run was asked, not killed"

    trainer.step_seconds = 0.0
    records = trainer.run()
    assert {record.status for record in records.values()} == {"finished"}
    assert trainer.order[:3] == ["plain/0", "plain/0", "delta/0"]


def _same(report: ReportData) -> dict[str, Any]:
    """What a report says, without when and where it was made."""
    return report.replace(made="", command="").to_data()


def test_a_killed_runner_and_the_same_command_again_yield_the_same_report(trainer: FakeTrainer, tmp_path: Path) -> None:
    trainer.study = trainer.study.replace(
        budget={"steps": 12, "ladder": [0.5, 2.0]}, tuning={"lr": [1e-3, 1e-2], "seed": 9, "widen": 1}
    )
    trainer.spread(delta=-0.1)
    trainer.step_seconds = 0.01
    said, never_killed = tmp_path / "said.txt", tmp_path / "whole" / "study"
    assert status_of(start(trainer, never_killed, said)) == 0
    random = Random(0)
    for _ in range(4):
        child = start(trainer, trainer.folder, said)
        time.sleep(random.uniform(0.1, 1.0))
        os.kill(child, signal.SIGKILL)
        status_of(child)
    assert status_of(start(trainer, trainer.folder, said)) == 0
    killed, whole = (_same(read_study_folder(folder)) for folder in (trainer.folder, never_killed))
    assert killed["complete"] and killed == whole


def test_runs_at_once_come_to_the_same(trainer: FakeTrainer) -> None:
    trainer.spread(delta=-0.1)
    trainer.step_seconds = 0.02
    trainer.actions["local/1"] = ["kill"]
    records = trainer.run(engine=LocalEngine(jobs=3))
    assert {str(key): record.status for key, record in records.items() if record.status != "finished"} == {
        "local seed 1": "failed"
    }
    assert len(trainer.order) == 9


def test_a_grid_is_widened_until_its_best_rate_lies_inside(trainer: FakeTrainer) -> None:
    trainer.study = trainer.study.replace(tuning={"lr": [1e-3, 1e-2, 1e-1], "seed": 9, "tokens": 100, "widen": 2})
    trainer.spread(**{"plain@lr=0.01": -1.0, "delta@lr=0.1": -1.0, "local@lr=0.001": -1.0})
    trainer.losses |= {"delta@lr=1/9": 9.0, "local@lr=0.0001/9": 3.0, "local@lr=1e-05/9": 2.0}
    trainer.actions["delta@lr=1/9"] = ["kill"]
    with pytest.raises(StudyError, match="every trial must have run"):
        trainer.run()
    trainer.run()
    tried = [name for name in trainer.order if "@" in name]
    assert tried[9:] == ["delta@lr=1/9", "local@lr=0.0001/9", "delta@lr=1/9", "local@lr=1e-05/9"]
    folder = StudyFolder(trainer.folder)
    assert folder.learning_rates == {"plain": 0.01, "delta": 0.1, "local": 1e-05}
    assert {arm.steps for arm in folder.plan.of_role("trial")} == {2}, "100 tokens of 64 a step"
    assert folder.run(RunKey("local", 2)).config.optimizer.lr == 1e-05
    assert folder.run(RunKey("local", 2)).config.steps == 6
    report = read_study_folder(trainer.folder)
    assert (
        report.complete
        and report.tuning is not None
        and set(report.tuning.losses["local"]) == {*("1e-05", "0.0001", "0.001", "0.01", "0.1")}
    )
    assert any("is the best of 3 to 5, by one trial each" in limit for limit in report.limits)


def test_trials_choose_the_learning_rates(trainer: FakeTrainer) -> None:
    trainer.study = trainer.study.replace(tuning={"lr": [1e-3, 1e-2, 1e-1], "seed": 9, "widen": 0})
    trainer.spread(**{"plain@lr=0.01": -1.0, "delta@lr=0.1": -1.0, "local@lr=0.001": -1.0})
    trainer.actions["plain@lr=0.1/9"] = ["diverge"]
    trainer.run()
    folder = StudyFolder(trainer.folder)
    assert folder.learning_rates == {"plain": 0.01, "delta": 0.1, "local": 0.001}
    assert folder.run(RunKey("delta", 2)).config.optimizer.lr == 0.1
    trainer.bigram = 4.0
    trainer.run()
    report = read_study_folder(trainer.folder)
    tuning = report.tuning
    assert report.gate is not None and "learning rate (now 0.01;" in report.gate.change, "the tuned one"
    assert tuning is not None and tuning.losses["plain"]["0.1"] is None and tuning.chosen["local"] == 0.001
    assert tuning.tokens == 9 * 6 * 64
    trainer.run()
    assert len(trainer.order) == 18


def test_an_arm_that_no_learning_rate_trains_is_an_outcome(trainer: FakeTrainer) -> None:
    trainer.study = trainer.study.replace(tuning={"lr": [1e-3, 1e-2], "seed": 9, "widen": 1})
    trainer.spread()
    trainer.actions |= {f"delta@lr={lr}/9": ["diverge"] for lr in ("0.001", "0.01")}
    records = trainer.run()
    assert records[RunKey("delta", 0)].status == "failed"
    assert "no learning rate of delta trained" in records[RunKey("delta", 0)].message
    assert records[RunKey("local", 0)].status == "finished"


def test_a_trial_that_failed_is_tried_again_before_anything_else(trainer: FakeTrainer) -> None:
    trainer.study = trainer.study.replace(tuning={"lr": [1e-3, 1e-2], "seed": 9, "widen": 1})
    trainer.spread()
    trainer.actions["delta@lr=0.01/9"] = ["kill"]
    with pytest.raises(StudyError, match="every trial must have run"):
        trainer.run()
    assert len(trainer.order) == 6
    assert {record.status for record in trainer.run().values()} == {"finished"}


def test_an_interrupted_study_has_complete_pairs(study: StudyConfig) -> None:
    order = run_keys(plan_study(study))
    for end in range(3, len(order) + 1, 3):
        arms = {key.seed: {other.arm for other in order[:end] if other.seed == key.seed} for key in order[:end]}
        assert all(names == set(study.arms) for names in arms.values())


LAUNCHER = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


def test_the_command_line_of_a_run() -> None:
    command = train_command(Path("recipe.json"), Path("run"))
    assert command == [sys.executable, "-m", "twoaxis", "train", "recipe.json", "--folder", "run"]
    assert launched(command, 1) == tuple(command)
    assert launched(command, 2)[1:] == (*LAUNCHER, "2", "-m", "twoaxis", "train", "recipe.json", "--folder", "run")


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
    progress.start(total_runs=4, finished_runs=1, total_steps=400, finished_steps=100, tokens_per_step=64)
    progress.begin(RunKey("delta", 0), 100, 0)
    progress.begin(RunKey("local", 0), 100, 50)
    for now, step in ((5.0, 1), (15.0, 20)):
        clock[0] = now
        progress.step(RunKey("local", 0), 50 + step)
        progress.step(RunKey("delta", 0), step)
    # 21 steps of 64 tokens in 15 s when the line is due; of 400 steps 229 are left.
    said = capsys.readouterr().err
    assert "delta seed 0: step 1 of 100, local seed 0: step 70 of 100" in said
    assert "90 tokens/s  about 2:44 left for the study" in said


def test_forecast_before_the_first_step() -> None:
    forecast = Forecast(total_runs=2, finished_runs=0, total_steps=20, finished_steps=0, tokens_per_step=64)
    forecast.begin(RunKey("delta", 0), 10, 0)
    assert forecast.words() == "starting"


def test_a_rate_that_rounds_to_one_of_the_grid_widens_nothing() -> None:
    assert next_rate({0.999: 3.2, 1.0: 3.1}) is None
    with pytest.raises(ConfigError, match="differ in their first three digits"):
        TuningConfig(lr=(0.001, 0.0010001))
