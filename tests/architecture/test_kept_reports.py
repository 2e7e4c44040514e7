"""The reports that ship with the package are those of the repository, and say which of them are evidence."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from twoaxis.core.kept_reports import KEPT, KeptReport, kept_reports

from ..scripts import DOCS, load_script


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script(DOCS / "kept_reports.py")


def test_the_file_is_up_to_date(script: ModuleType) -> None:
    assert KEPT.read_text(encoding="utf-8") == script.text(), "run `make docs`"


def test_a_report_is_kept_under_its_own_keys_without_its_runs(script: ModuleType, tmp_path: Path) -> None:
    arm = {"role": "control", "losses": {"0": 1.0}, "audit": {"large": 1}, "charged": {"tokens": {"cost": 1}, "flops": {}}}
    blocks = [
        [{"kind": "attention", "input_local": {"kind": "canon"}, "projected_local": {"kind": "canon"}}, {"kind": "swiglu"}]
    ]
    run = {"arm": "a", "recipe": {"model": {"depth": {"kind": "residual"}, "blocks": blocks, "n_layers": 3}}, "loss": 1.0}
    report = {"question": "q", "charge": "tokens", "gate": {"passed": True}, "arms": {"a": arm}, "runs": [run], "timing": {}}
    for folder in ("studies/results/one", "studies/superseded/two"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "report.json").write_text(json.dumps(report), encoding="utf-8")
    (tmp_path / "studies/superseded/three.json").write_text(json.dumps(report), encoding="utf-8")
    (tmp_path / "studies/superseded/two/other.json").write_text("{}", encoding="utf-8")
    found = list(script.entries(tmp_path / "studies"))
    assert [(each["name"], each["status"]) for each in found] == [
        ("one", "current"),
        ("three", "superseded"),
        ("two", "superseded"),
    ]
    assert found[0]["path"] == "studies/results/one/report.json"
    model = {"depth": {"kind": "residual"}, "mixers": {"attention": 3, "attention+canon": 3, "swiglu": 3}}
    arms = {"a": {"role": "control", "losses": {"0": 1.0}, **model, "charged": {"tokens": {"cost": 1}}}}
    assert found[0]["report"] == {"question": "q", "charge": "tokens", "gate": {"passed": True}, "arms": arms}


def test_reports_do_not_depend_on_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = kept_reports()
    kept_reports.cache_clear()
    monkeypatch.chdir(tmp_path)
    assert kept_reports() == here and here


@pytest.mark.parametrize(
    ("status", "changes", "why"),
    [
        ("current", {"gate": {"passed": True, "sentence": "below the bigram"}, "complete": True}, ""),
        ("current", {"complete": True}, "its report has no validity gate"),
        ("current", {"gate": None, "complete": True}, "its report has no validity gate"),
        ("current", {"gate": {"passed": None, "sentence": "No baseline."}, "complete": True}, "No baseline"),
        ("current", {"gate": {"passed": False, "sentence": "Not trained."}, "complete": True}, "Not trained"),
        ("current", {"gate": {"passed": True, "sentence": ""}, "complete": False}, "runs are missing"),
        ("superseded", {"gate": {"passed": True, "sentence": ""}, "complete": True}, "superseded by a later design"),
        ("superseded", {"gate": {"passed": False, "sentence": "Not trained."}}, "superseded by a later design; Not trained"),
    ],
)
def test_only_a_complete_current_report_that_passed_its_gate_is_evidence(
    status: Any, changes: dict[str, Any], why: str
) -> None:
    assert KeptReport("one", status, "one.json", {"question": "q", **changes}).withdrawn == why
