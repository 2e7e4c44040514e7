"""The studies at GPT-2's small shape can be planned anywhere; the short study of the GPU check runs a cut of one."""

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from twoaxis.study import read_study
from twoaxis.study.planning import plan_study
from twoaxis.study.report import read_study_folder
from twoaxis.study.running.study_folder import write_json

from .scripted import FakeTrainer

ROOT = Path(__file__).parents[2]
STUDIES = ROOT / "studies"
H100_FLOPS_PER_SECOND = 989e12


@pytest.fixture
def short_study(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.gpu.study")


@pytest.mark.parametrize("name", ["shortcut", "fork"])
def test_study_at_gpt2_small_is_planned(name: str) -> None:
    study = read_study(STUDIES / "gpu" / f"{name}.toml")
    plan = plan_study(study)
    model = plan.control.recipe["model"]
    embedding = model["vocab_size"] * model["d_model"]
    assert plan.control.parameters == pytest.approx(124e6, rel=0.01), "with the tied embedding, counted once"
    assert plan.control.parameters - embedding == pytest.approx(85e6, rel=0.01)
    assert all(arm.parameters == pytest.approx(124e6, rel=0.03) for arm in plan.arms)
    assert all(arm.recipe["compile"] == "block" and arm.recipe["device"] == "cuda" for arm in plan.arms)
    # Counted, not measured: at 30 % of an H100, with 40 s to start and compile each run.
    for arm in plan.arms:
        assert len(arm.seeds) * (arm.flops / (0.3 * H100_FLOPS_PER_SECOND) + 40) <= 600, arm.name
    assert plan.of_role("companion") and len(plan.of_role("rung")) == 4


@pytest.mark.parametrize("name", ["shortcut", "fork"])
def test_arms_and_decision_are_those_of_the_first_cpu_study(name: str) -> None:
    ours, theirs = (read_study(STUDIES / path) for path in (f"gpu/{name}.toml", f"superseded/{name}_1.toml"))
    assert ours.arms == theirs.arms
    assert (ours.controls, ours.controls_match, ours.decision) == (theirs.controls, theirs.controls_match, theirs.decision)
    assert ours.budget.ladder == theirs.budget.ladder


@pytest.mark.parametrize("size", ["full", "small"])
def test_short_study_is_a_cut_of_one(size: Any, short_study: ModuleType, tmp_path: Path) -> None:
    command = short_study.command(short_study.Settings("cpu", size), tmp_path)
    assert command[1:5] == ["-m", "twoaxis", "study", str(STUDIES / "gpu" / "shortcut.toml")]
    plan = plan_study(read_study(Path(command[4]), command[5 : command.index("--out")]))
    assert [arm.name for arm in plan.arms] == ["residual", "deep_delta"] and plan.runs == 4
    assert all(arm.recipe["device"] == "cpu" and arm.recipe["compile"] == "off" for arm in plan.arms)


def test_short_study_reads_its_report(short_study: ModuleType, trainer: FakeTrainer, tmp_path: Path) -> None:
    trainer.spread(delta=-0.1, local=0.0001)
    trainer.run()
    write_json(tmp_path / "there" / "report.json", read_study_folder(trainer.folder).to_data())
    out = tmp_path / "short"
    copy = f"import shutil; shutil.copytree({str(tmp_path / 'there')!r}, {str(out)!r})"
    rows = short_study.run(_settings(short_study), out, 60.0, lambda *_: [sys.executable, "-c", copy])
    assert [(row["arm"], row["verdict"], row["ok"]) for row in rows] == [
        ("plain", "control", True),
        ("delta", "better", True),
        ("local", "undecided", True),
    ]


@pytest.mark.parametrize(
    ("code", "seconds", "words"),
    [
        ("import sys; sys.exit('no such corpus')", 60.0, "ended with exit code 1: no such corpus"),
        ("import time; time.sleep(60)", 0.0, "took more than 0 s and was stopped"),
        ("", 60.0, "ended with exit code 0 without output"),
    ],
    ids=["fails", "takes too long", "writes no report"],
)
def test_short_study_that_fails_says_so(code: str, seconds: float, words: str, short_study: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(short_study.ItemFailed, match=words):
        short_study.run(_settings(short_study), tmp_path / "study", seconds, lambda *_: [sys.executable, "-c", code])


def _settings(module: ModuleType) -> Any:
    return module.Settings("cpu", "small")
