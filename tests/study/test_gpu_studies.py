"""The studies for a GPU can be planned anywhere; the short study of the GPU check runs a cut of one."""

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
H200_FLOPS_PER_SECOND = 989e12


@pytest.fixture
def short_study(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.gpu.study")


def test_studies_fit_a_quarter_of_an_hour() -> None:
    """Counted, not measured: at a fifth of an H200, with 40 s to start and compile each run, four at once."""
    for name in ("shortcut", "fork"):
        plan = plan_study(read_study(STUDIES / "gpu" / f"{name}.toml"))
        assert all(10e6 < arm.parameters < 30e6 for arm in plan.arms)
        assert all(arm.recipe["compile"] == "block" and arm.recipe["device"] == "cuda" for arm in plan.arms)
        seconds = sum(len(arm.seeds) * arm.flops for arm in plan.arms) / (0.2 * H200_FLOPS_PER_SECOND) + 40 * plan.runs / 4
        assert seconds <= 12 * 60
        assert {len(arm.seeds) for arm in plan.of_role("control", "treatment")} == {4} and plan.of_role("trial")


def test_the_second_study_uses_runs_of_the_first() -> None:
    one, two = (read_study(STUDIES / "gpu" / f"{name}.toml") for name in ("shortcut", "fork"))
    assert (one.base, one.budget, one.tuning, one.replicates) == (two.base, two.budget, two.tuning, two.replicates)
    shared = one.arms.keys() & two.arms.keys()
    assert shared == {"residual", "deep_delta", "short_swa"}
    assert all(one.arms[name] == two.arms[name] for name in shared)


@pytest.mark.parametrize("size", ["full", "small"])
def test_short_study_is_a_cut_of_one(size: Any, short_study: ModuleType, tmp_path: Path) -> None:
    command = short_study.command(short_study.Settings("cpu", size), tmp_path)
    assert command[1:5] == ["-m", "twoaxis", "study", str(STUDIES / "gpu" / "shortcut.toml")]
    plan = plan_study(read_study(Path(command[4]), command[5 : command.index("--out")]))
    assert [arm.name for arm in plan.of_role("control", "treatment")] == ["residual", "deep_delta"] and plan.runs == 8
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
