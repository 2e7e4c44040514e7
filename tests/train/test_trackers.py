"""Trackers show a run elsewhere: every step once, under one name, and without any influence on the run."""

import json
import os
import select
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from twoaxis import ConfigError
from twoaxis.cli import main
from twoaxis.train import TRACKERS, Progress, StepRecord, TrackedRun, TrainConfig, read_metrics, train
from twoaxis.train.trackers import build_trackers
from twoaxis.train.trackers.services import WandbConfig
from twoaxis.train.trackers.tracking import LoggedSteps, series

from ..fresh import run_fresh

Recipe = Callable[..., TrainConfig]
LAST_STEP = 20


class Recorder:
    """Keeps what it is told; a subclass has a cursor of its own, since a tracker's name is that of its class."""

    def __init__(self) -> None:
        self.run: TrackedRun | None = None
        self.steps: list[int] = []
        self.tokens: list[int] = []
        self.values: list[dict[str, float]] = []
        self.ends: list[Mapping[str, Any] | None] = []

    def start(self, run: TrackedRun) -> None:
        self.run = run

    def log(self, step: int, tokens: int, values: Mapping[str, float]) -> None:
        self.steps.append(step)
        self.tokens.append(tokens)
        self.values.append(dict(values))

    def finish(self, result: Mapping[str, Any] | None) -> None:
        self.ends.append(result)


class Late(Recorder):
    """Joins a run that others have tracked from its first step."""


class Rude(Recorder):
    """Draws random numbers, prints, and changes what it is handed."""

    def start(self, run: TrackedRun) -> None:
        super().start(run)
        run.config["steps"] = torch.randint(9, ()).item()
        print("noise")

    def log(self, step: int, tokens: int, values: Any) -> None:
        super().log(step, tokens, values)
        torch.rand(3)
        print("noise")
        values.clear()

    def finish(self, result: Any) -> None:
        super().finish(result)
        torch.rand(3)
        print("noise")
        result.clear()


class FailsAt(Recorder):
    """Cannot log the step it is made with."""

    def __init__(self, step: int, error: type[BaseException] = OSError) -> None:
        super().__init__()
        self.step, self.error = step, error

    def log(self, step: int, tokens: int, values: Mapping[str, float]) -> None:
        if step == self.step:
            raise self.error("the server\nis gone")
        super().log(step, tokens, values)


class Notes(Progress):
    def __init__(self, dies_at: int | None = None) -> None:
        self.lines: list[str] = []
        self.dies_at = dies_at

    def step(self, record: StepRecord) -> None:
        if record.step == self.dies_at:
            raise RuntimeError("power cut")

    def note(self, text: str) -> None:
        self.lines.append(text)


class StopAfter:
    def __init__(self, steps: int) -> None:
        self.left = steps

    def __call__(self) -> bool:
        self.left -= 1
        return self.left <= 0


def test_a_tracker_of_your_own_is_told_every_step_by_name(recipe: Recipe, tmp_path: Path) -> None:
    config, recorder = recipe(steps=6), Recorder()
    result = train(config, tmp_path / "run", trackers=[recorder])
    assert recorder.run is not None and recorder.run.logged_steps is None and recorder.run.folder == tmp_path / "run"
    assert recorder.run.config == config.to_data() and recorder.run.id.isalnum() and len(recorder.run.id) == 16
    assert recorder.steps == [1, 2, 3, 4, 5, 6] and recorder.tokens == [48 * step for step in recorder.steps]
    always = ["train/loss", "train/grad_norm", "train/lr", "train/tokens_per_second"]
    assert [list(values) for values in recorder.values] == [always] * 4 + [[*always, "validation/loss", "validation/bpb"]] * 2
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert recorder.values == [series(record, 48) for record in records]
    assert recorder.values[5]["validation/loss"] == result.validation_loss
    assert recorder.ends == [result.to_data()]


def test_accuracy_is_a_series_where_there_is_one() -> None:
    record = StepRecord(1, 2.0, 1.0, 0.1, 40, 0.5, validation_loss=3.0, bpb=4.0, validation_accuracy=0.25)
    expected = {"train/loss": 2.0, "train/grad_norm": 1.0, "train/lr": 0.1, "train/tokens_per_second": 96.0}
    assert series(record, 48) == {**expected, "validation/loss": 3.0, "validation/bpb": 4.0, "validation/accuracy": 0.25}
    assert "train/tokens_per_second" not in series(record._replace(seconds=0.0), 48)


def unchanging(run: Path) -> tuple[list[StepRecord], dict[str, Any]]:
    """What a run is: its losses, and the state it ends in with the checksums of its tensors; not what a clock tells."""
    state = json.loads((run / "checkpoints" / f"step-{LAST_STEP:08d}" / "state.json").read_text())["state"]
    assert {"model.safetensors", "optimizer.safetensors"} == state["files"].keys()
    del state["peak_memory_bytes"]
    return [record._replace(seconds=0.0) for record in read_metrics(run / "metrics.jsonl")], state


def test_a_tracker_never_influences_a_run(recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, notes = recipe(), Notes()
    plain = train(config, tmp_path / "plain")
    rude, fails = Rude(), FailsAt(7)
    tracked = train(config, tmp_path / "tracked", progress=notes, trackers=[rude, fails])
    assert unchanging(tmp_path / "plain") == unchanging(tmp_path / "tracked")
    measured = {"train_seconds", "tokens_per_second", "step_seconds", "peak_memory_bytes"}
    assert plain.model_dump(exclude=measured) == tracked.model_dump(exclude=measured)
    assert rude.steps == list(range(1, LAST_STEP + 1)) and rude.ends == [{}]
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("noise") == LAST_STEP + 2
    # Said once, and then left alone.
    failed = [line for line in notes.lines if "FailsAt" in line]
    expected = "tracker 'FailsAt' failed and is switched off (OSError: the server is gone); the run goes on"
    assert len(failed) == 1 and failed[0].startswith(expected)
    assert fails.steps == [1, 2, 3, 4, 5, 6] and fails.ends == []


def test_a_tracker_that_cannot_finish_does_no_harm(recipe: Recipe, tmp_path: Path) -> None:
    class CannotFinish(Recorder):
        def finish(self, result: Mapping[str, Any] | None) -> None:
            raise ConnectionError

    notes, other = Notes(), Recorder()
    assert train(recipe(steps=2), tmp_path / "run", notes, trackers=[CannotFinish(), other]).status == "finished"
    assert len([line for line in notes.lines if "tracker 'CannotFinish' failed and is switched off" in line]) == 1
    assert len(other.ends) == 1


def test_a_tracker_that_cannot_start_is_an_error_before_the_first_step(recipe: Recipe, tmp_path: Path) -> None:
    class CannotStart(Recorder):
        def start(self, run: TrackedRun) -> None:
            raise ConnectionError("no\nroute")

    other = Recorder()
    message = r"tracker 'CannotStart': cannot be started \(ConnectionError: no route\); repair it, or train without it"
    with pytest.raises(ConfigError, match=message):
        train(recipe(), tmp_path / "run", trackers=[other, CannotStart()])
    assert read_metrics(tmp_path / "run" / "metrics.jsonl") == []
    assert other.steps == [] and other.ends == [None]


def test_a_resumed_run_goes_on_in_every_tracker_and_repeats_no_step(recipe: Recipe, tmp_path: Path) -> None:
    config = recipe()
    first, second, third, late = Recorder(), Recorder(), Recorder(), Late()
    with pytest.raises(RuntimeError, match="power cut"):
        train(config, tmp_path / "run", Notes(dies_at=9), trackers=[first])
    # The checkpoint is of step 5: steps 6 to 8 are taken again, but not told again.
    assert first.steps == [1, 2, 3, 4, 5, 6, 7, 8] and first.ends == [None]
    result = train(config, tmp_path / "run", should_stop=StopAfter(7), trackers=[second, late])
    assert result.status == "interrupted"
    assert second.steps == [9, 10, 11, 12] and second.ends == [None]
    assert late.steps == list(range(1, 13))
    result = train(config, tmp_path / "run", trackers=[third])
    assert third.steps == list(range(13, 21)) and third.ends == [result.to_data()]
    runs = [tracker.run for tracker in (first, second, third, late) if tracker.run is not None]
    assert [run.logged_steps for run in runs] == [None, 8, 12, None] and len({run.id for run in runs}) == 1
    assert first.values + second.values + third.values == [
        values | {"train/tokens_per_second": again["train/tokens_per_second"]}
        for values, again in zip(
            [series(record, 48) for record in read_metrics(tmp_path / "run" / "metrics.jsonl")],
            first.values + second.values + third.values,
            strict=True,
        )
    ]


def test_what_a_broken_tracker_missed_is_told_when_the_run_goes_on(recipe: Recipe, tmp_path: Path) -> None:
    config = recipe()
    train(config, tmp_path / "run", should_stop=StopAfter(10), trackers=[FailsAt(4)])
    again = FailsAt(0)
    train(config, tmp_path / "run", trackers=[again])
    assert again.run is not None and again.run.logged_steps == 3
    assert again.steps == list(range(4, 21))


def test_a_kill_while_a_step_is_told_never_tells_it_twice(recipe: Recipe, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        train(recipe(steps=8), tmp_path / "run", trackers=[FailsAt(7, SystemExit)])
    again = FailsAt(0)
    train(recipe(steps=8), tmp_path / "run", trackers=[again])
    assert again.steps == [8]


def test_the_count_of_logged_steps_survives_and_a_damaged_one_is_none(tmp_path: Path) -> None:
    told = LoggedSteps(tmp_path / "trackers" / "one")
    assert told.steps == 0
    for steps in (10**6, 9):
        told.write(steps)
        # Readable after every write, though the file is still open.
        assert LoggedSteps(told.path).steps == steps
    told.close()
    told.path.write_bytes(b"")
    assert LoggedSteps(told.path).steps == 0


def test_two_folders_are_two_runs(recipe: Recipe, tmp_path: Path) -> None:
    recorders = Recorder(), Recorder()
    for name, recorder in zip("ab", recorders, strict=True):
        train(recipe(steps=1), tmp_path / name, trackers=[recorder])
    assert len({recorder.run.id for recorder in recorders if recorder.run is not None}) == 2


def test_a_run_that_diverges_is_told_to_its_end(recipe: Recipe, tmp_path: Path) -> None:
    recorder = Recorder()
    wild = recipe(optimizer={"lr": 1e30, "clip_norm": None}, schedule={"kind": "constant", "warmup_steps": 0})
    result = train(wild, tmp_path / "run", trackers=[recorder])
    assert result.status == "diverged" and recorder.steps == list(range(1, result.steps + 1))
    assert recorder.ends == [result.to_data()]


@pytest.mark.parametrize(
    ("trackers", "message"),
    [
        (["tensorbord"], r"unknown tracker 'tensorbord'; did you mean 'tensorboard'\?"),
        ("tensorbord", r"unknown tracker 'tensorbord'; did you mean 'tensorboard'\?"),
        ([{"kind": "wandb", "projekt": "p"}], r"unknown key 'projekt' in 'wandb'; did you mean 'project'\?"),
        ([Recorder(), Recorder()], "tracker 'Recorder' is named twice: must be named once; leave one out"),
        ([3], r"tracker int: must be a kind, a table, or an object with the methods start, log and finish; choose one of tens"),
    ],
    ids=["unknown", "bare", "option", "twice", "none"],
)
def test_a_choice_that_cannot_be(trackers: Any, message: str, recipe: Recipe, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        train(recipe(), tmp_path / "run", trackers=trackers)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


MODULES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "trackio": "trackio"}


@pytest.mark.parametrize("kind", [row.kind for row in TRACKERS])
def test_a_package_that_is_missing(kind: str, recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, MODULES[kind], None)
    with pytest.raises(ConfigError, match=rf"tracker '{kind}': .*; run: pip install 'twoaxis\[{kind}\]'$") as caught:
        train(recipe(), tmp_path / "run", trackers=[kind])
    assert "\n" not in str(caught.value) and not (tmp_path / "run" / "config.json").exists()


def test_the_project_of_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        """Stands in for wandb, which need not be installed to choose a project."""

    monkeypatch.setitem(sys.modules, "wandb", Library)  # pyright: ignore[reportArgumentType]
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    chosen = [{"kind": "wandb"}, WandbConfig(project="depth")]
    assert [vars(build_trackers([one])["wandb"])["_project"] for one in chosen] == ["twoaxis", "depth"]
    monkeypatch.setenv("WANDB_PROJECT", "sequence")
    assert [vars(build_trackers([one])["wandb"])["_project"] for one in chosen] == ["sequence", "depth"]


def environment(tmp_path: Path, **more: str) -> dict[str, str]:
    """The environment of a process whose trackers keep everything under `tmp_path` and know of no account."""
    homes = ("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "HF_HOME", "TRACKIO_DIR")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("WANDB_", "TRACKIO_", "HF_"))}
    return {**kept, **{name: str(tmp_path / "home" / name) for name in homes}, "OMP_NUM_THREADS": "1", **more}


TWO_LIVES = """
import json, sys, time
from pathlib import Path
from twoaxis.train import Progress, console_progress, read_recipe, train

class PowerCut(Exception):
    pass

class Dies(Progress):
    def step(self, record):
        if record.step == 4:
            raise PowerCut

recipe = read_recipe(Path("recipe.json"))
try:
    train(recipe, "run", Dies(), trackers=[sys.argv[1]])
except PowerCut:
    time.sleep(1.1)  # wandb names the folder of a life by the second
    print(json.dumps(train(recipe, "run", console_progress(), trackers=[sys.argv[1]]).to_data()))
"""


def live_twice(kind: str, config: TrainConfig, tmp_path: Path, **more: str) -> dict[str, Any]:
    """Trains in a process of its own, dies in step 4 after a checkpoint of step 2, goes on, and returns the result."""
    (tmp_path / "recipe.json").write_text(json.dumps(config.to_data()))
    done = run_fresh(TWO_LIVES, kind, cwd=tmp_path, env=environment(tmp_path, **more))
    assert done.returncode == 0 and "resuming after step 2" in done.stderr, done.stderr
    assert "switched off" not in done.stderr
    # All that the tracker printed went elsewhere.
    return json.loads(done.stdout)


def expected_points(run: Path) -> list[dict[str, float]]:
    """What a tracker must hold of a run, step by step, without the speed, which a repeated step measures again."""
    points = [{**series(record, 48), "tokens": 48.0 * record.step} for record in read_metrics(run / "metrics.jsonl")]
    return [{name: value for name, value in point.items() if name != "train/tokens_per_second"} for point in points]


def test_tensorboard_holds_every_step_once(recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = recipe(steps=6, checkpoint_every=2)
    with pytest.raises(RuntimeError, match="power cut"):
        train(config, tmp_path / "run", Notes(dies_at=4), trackers=["tensorboard"])
    (tmp_path / "recipe.json").write_text(json.dumps(config.to_data()))
    words = ["train", str(tmp_path / "recipe.json"), "--run", str(tmp_path / "run"), "--track", "tensorboard", "--json"]
    assert main(words) == 0
    printed = json.loads(capsys.readouterr().out)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"), {"scalars": 0, "tensors": 0}).Reload()
    points = expected_points(tmp_path / "run")
    names = {name for point in points for name in point}
    assert set(events.Tags()["scalars"]) == names | {"train/tokens_per_second"}
    for name in names:
        found = [(scalar.step, scalar.value) for scalar in events.Scalars(name)]
        # TensorBoard keeps single precision.
        assert found == [(i, torch.tensor(p[name]).item()) for i, p in enumerate(points, 1) if name in p], name
    assert [scalar.step for scalar in events.Scalars("train/tokens_per_second")] == [1, 2, 3, 4, 5, 6]
    texts = {tag: events.Tensors(f"{tag}/text_summary") for tag in ("config", "result")}
    assert [(len(found), found[0].step) for found in texts.values()] == [(1, 0), (1, 6)]
    said = {tag: json.loads(found[0].tensor_proto.string_val[0].decode().strip("`json\n")) for tag, found in texts.items()}
    assert said["config"] == config.to_data()
    assert {"run": str(tmp_path / "run"), **said["result"]} == printed


if find_spec("wandb"):

    def wandb_records(path: Path) -> Iterator[Any]:
        """Reads an offline run: a header of 7 bytes, then a log of records in blocks of 32 KiB, as LevelDB writes it."""
        messages = import_module("wandb.proto.wandb_internal_pb2")
        content, at, whole = path.read_bytes(), 7, b""
        while at + 7 <= len(content):
            if 32768 - at % 32768 < 7:
                at += 32768 - at % 32768
                continue
            length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
            whole += content[at + 7 : at + 7 + length]
            at += 7 + length
            # A record is whole (1), or its last part (4) has come.
            if kind in (1, 4):
                yield messages.Record.FromString(whole)
                whole = b""

    def items(found: Any) -> dict[str, Any]:
        return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in found}

    def test_wandb_offline_holds_every_step_once(recipe: Recipe, tmp_path: Path) -> None:
        tracked = recipe(steps=6, checkpoint_every=2)
        result = live_twice("wandb", tracked, tmp_path, WANDB_MODE="offline")
        identity = json.loads((tmp_path / "run" / "tracking.json").read_text())["run_id"]
        files = sorted((tmp_path / "run" / "wandb").glob(f"offline-run-*-{identity}/run-{identity}.wandb"))
        assert len(files) == 2
        lives = [list(wandb_records(file)) for file in files]
        history = [
            items(record.history.item) for life in lives for record in life if record.WhichOneof("record_type") == "history"
        ]
        points = expected_points(tmp_path / "run")
        assert [point["_step"] for point in history] == [1, 2, 3, 4, 5, 6]
        for found, expected in zip(history, points, strict=True):
            assert {name: found.get(name) for name in expected} == expected
            assert found.keys() - expected.keys() == {"_step", "_runtime", "_timestamp", "train/tokens_per_second"}
        runs = [record.run for life in lives for record in life if record.WhichOneof("record_type") == "run"]
        assert {(run.run_id, run.project, run.display_name) for run in runs} == {(identity, "twoaxis", "run")}
        config = items(runs[0].config.update)
        assert tracked.to_data().items() <= config.items()
        summary: dict[str, Any] = {}
        for record in lives[1]:
            summary |= items(record.summary.update)
        assert result.items() <= summary.items()
        # Neither what the run printed, nor the code, nor the machine.
        kinds = {record.WhichOneof("record_type") for life in lives for record in life}
        assert not kinds & {"output", "output_raw", "stats", "environment", "artifact", "use_artifact"}
        assert not [path for file in files for path in (file.parent / "files").iterdir()]

    def test_wandb_without_an_account_is_one_line_and_no_prompt(recipe: Recipe, tmp_path: Path) -> None:
        import pty

        (tmp_path / "recipe.json").write_text(json.dumps(recipe().to_data()))
        command = [sys.executable, "-m", "twoaxis", "train", "recipe.json", "--run", "run", "--track", "wandb"]
        # A terminal, where wandb would ask and wait.
        terminal, inside = pty.openpty()
        process = subprocess.Popen(command, cwd=tmp_path, env=environment(tmp_path), stdin=inside, stdout=inside, stderr=inside)
        os.close(inside)
        ends = time.monotonic() + 100
        printed = b""
        try:
            # A terminal that nobody reads makes a process wait that writes to it.
            while time.monotonic() < ends:
                ended = process.poll() is not None
                if select.select([terminal], [], [], 0.1)[0]:
                    printed += os.read(terminal, 4096)
                elif ended:
                    break
        except OSError:
            # How a terminal says that nobody writes to it any more.
            process.wait(10)
        finally:
            process.kill()
            status = process.wait()
            os.close(terminal)
        assert status == 2, printed
        last = printed.decode().splitlines()[-1]
        assert "twoaxis: tracker 'wandb': cannot be started (" in last and "set WANDB_MODE=offline" in last
        assert read_metrics(tmp_path / "run" / "metrics.jsonl") == []

else:

    def test_wandb_is_not_installed_so_only_its_remedy_is_tested() -> None:
        with pytest.raises(ConfigError, match="pip install"):
            build_trackers(["wandb"])


if find_spec("trackio"):

    def test_trackio_holds_every_step_once(recipe: Recipe, tmp_path: Path) -> None:
        tracked = recipe(steps=6, checkpoint_every=2)
        result = live_twice("trackio", tracked, tmp_path)
        identity = json.loads((tmp_path / "run" / "tracking.json").read_text())["run_id"]
        (database,) = (tmp_path / "home" / "TRACKIO_DIR").glob("twoaxis*.db")
        with closing(sqlite3.connect(database)) as connection:
            rows = connection.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id").fetchall()
            configs = connection.execute("SELECT run_name, config FROM configs").fetchall()
        *points, end = [(name, step, json.loads(metrics)) for name, step, metrics in rows]
        assert {name for name, _, _ in [*points, end]} == {f"run-{identity}"}
        assert [step for _, step, _ in points] == [1, 2, 3, 4, 5, 6]
        for (_, _, found), expected in zip(points, expected_points(tmp_path / "run"), strict=True):
            assert found == expected | {"train/tokens_per_second": found["train/tokens_per_second"]}
        assert end[1] == 6 and end[2] == {f"result/{name}": value for name, value in result.items()}
        assert [name for name, _ in configs] == [f"run-{identity}"]
        assert tracked.to_data().items() <= json.loads(configs[0][1]).items()

else:

    def test_trackio_is_not_installed_so_only_its_remedy_is_tested() -> None:
        with pytest.raises(ConfigError, match="pip install"):
            build_trackers(["trackio"])


def test_the_command_line_takes_options_and_says_what_is_wrong(
    recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(recipe(steps=2).to_data()))
    for tracker, message in [
        ("tensorbord", "unknown tracker 'tensorbord'; did you mean 'tensorboard'?"),
        ('{kind="wandb", projekt="p"}', "unknown key 'projekt' in 'wandb'; did you mean 'project'?"),
    ]:
        assert main(["train", str(path), "--run", str(tmp_path / "run"), "--track", tracker]) == 2
        assert capsys.readouterr().err == f"twoaxis: {message}\n"
