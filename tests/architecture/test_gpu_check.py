"""`benchmarks/gpu_check.py` walks every stage on a CPU, survives what fails, and finds what is wrong."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from twoaxis import DEPTH, DecoderConfig

ROOT = Path(__file__).parents[2]

STAGE = """
import os, time

def items(settings):
    def broken():
        raise ValueError("two\\nlines")
    return {
        "right": lambda: [{"what": "a", "ok": True}],
        "broken": broken,
        "dead": lambda: os._exit(7),
        "endless": lambda: time.sleep(600),
        "wrong": lambda: [{"what": "b", "ok": False, "ratio": 1.0}],
    }
"""


@pytest.fixture
def gpu_check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.gpu_check")


@pytest.fixture
def correctness(gpu_check: ModuleType) -> ModuleType:
    return importlib.import_module("benchmarks.gpu.correctness")


def test_every_stage_but_the_study_runs_on_a_cpu(gpu_check: ModuleType, tmp_path: Path) -> None:
    stages = [stage.module.rpartition(".")[2] for stage in gpu_check.STAGES]
    arguments = ["--device", "cpu", "--small", "--minutes", "10", "--save", str(tmp_path / "gpu-here")]
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_check.py"), *stages, *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "gpu-here.json").read_text())
    assert [stage["name"] for stage in result["stages"]] == [stage.name for stage in gpu_check.STAGES]
    assert all(stage["rows"] and not stage["failed"] and not stage["left_out"] for stage in result["stages"])
    assert done.stdout.strip() == (tmp_path / "gpu-here.md").read_text().strip()
    assert result["ok"] and "every check holds" in result["state"]


def test_what_fails_is_noted_and_the_rest_goes_on(
    gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "planted_stage.py").write_text(STAGE)
    monkeypatch.syspath_prepend(str(tmp_path))
    stage = gpu_check.Stage("Planted", "planted_stage", "A legend.", 1.0, item_seconds=0.0, item_limit_seconds=1.0)
    result = gpu_check.check(gpu_check.Settings("cpu"), 10.0, tmp_path / "gpu-x", [stage], studies=False)
    (found,) = json.loads((tmp_path / "gpu-x.json").read_text())["stages"]
    assert [row["what"] for row in found["rows"]] == ["a", "b"]
    assert {one["item"]: one["error"] for one in found["failed"]} == {
        "broken": "ValueError: two lines",
        "dead": "its process ended with exit code 7",
        "endless": "took more than 1 s and was ended",
    }
    text = (tmp_path / "gpu-x.md").read_text()
    assert "| b | **no** | 1 |" in text and "* **failed**: dead: " in text and "some checks do not hold" in text
    assert not result.ok


def test_what_does_not_fit_is_left_out(gpu_check: ModuleType, tmp_path: Path) -> None:
    result = gpu_check.check(gpu_check.Settings("cpu"), 0.0, tmp_path / "gpu-x")
    assert all(stage["left_out"] and not stage["rows"] for stage in result.data["stages"])
    assert len(result.data["stages"]) == len(gpu_check.STAGES) + 1
    assert result.ok, "nothing was found to be wrong"


def test_a_result_that_is_cut_off_keeps_what_is_known(gpu_check: ModuleType, tmp_path: Path) -> None:
    result = gpu_check.Result(tmp_path / "gpu-x", "title", {"device": "cpu"})
    result.begin("Stage", "legend")
    result.add([{"what": "a", "ok": True}])
    assert json.loads((tmp_path / "gpu-x.json").read_text())["stages"][0]["rows"] == [{"what": "a", "ok": True}]
    assert "**running**" in (tmp_path / "gpu-x.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["throuput"], "unknown stage 'throuput': must be one of environment"),
        (["--device", "cuda:99"], "device='cuda:99': cannot be used here"),
    ],
)
def test_bad_arguments_end_in_one_line(
    arguments: list[str], words: str, gpu_check: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        gpu_check.main(arguments)
    assert words in capsys.readouterr().err.splitlines()[-1]


def test_a_device_that_computes_otherwise_is_found(correctness: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    examples = {"code": DEPTH["deep_delta"].example("code")}
    assert correctness.checked(examples, "cpu")["ok"]
    outputs, calls = correctness.outputs, []

    def on_a_wrong_device(model: Any) -> Any:
        calls.append(model)
        found = outputs(model)
        return found._replace(gradients=found.gradients * 1.001) if len(calls) == 3 else found

    monkeypatch.setattr(correctness, "outputs", on_a_wrong_device)
    row = correctness.checked(examples, "cpu")
    assert not row["ok"] and row["first problem"].startswith("code: gradients off by 1.0e-03")


def test_half_precision_statistics_are_found(correctness: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    config = DEPTH["residual"].example("default")
    assert correctness.autocast_problems(config, "cpu") == []
    from twoaxis.testing import measured

    monkeypatch.setattr(measured, "STATISTICS", (*measured.STATISTICS, "silu"))
    assert correctness.autocast_problems(config, "cpu") == ["under autocast silu in half precision"]


def test_every_depth_mixer_has_a_place_in_the_table(gpu_check: ModuleType) -> None:
    throughput = importlib.import_module("benchmarks.gpu.throughput")
    models = throughput.models(12)
    kinds = {DEPTH.parse(changes["depth"]).to_data()["kind"] for changes in models.values() if "depth" in changes}
    assert kinds == {row.kind for row in DEPTH} - {"residual"}
    assert list(models)[: len(throughput.STUDIED)] == list(throughput.STUDIED)
    plain = {"vocab_size": 8, "d_model": 768, "n_layers": 12}
    assert all(DecoderConfig.from_data({**plain, **changes}).stack.n_sublayers >= 24 for changes in models.values())
