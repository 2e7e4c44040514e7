"""The report of a study: one data file, and a page, figures and tables that say what it says."""

import json
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from twoaxis.core.errors import StudyError
from twoaxis.data import prepare
from twoaxis.display import numbers as words
from twoaxis.display.figures import Figure
from twoaxis.study import StudyConfig
from twoaxis.study.figures import NAMES
from twoaxis.study.report import Report, read_study_folder, write_report
from twoaxis.study.report_data import ReportData, read_report

from ..checkpoints.hf_folder import byte_tokenizer
from .scripted import FakeTrainer


def test_the_data_file_is_all_there_is(report: Report, tmp_path: Path) -> None:
    data = read_report(report.json)
    assert data == report.data == ReportData.from_data(json.loads(report.json.read_text()))
    assert data.arms["delta"].verdict == "better" and data.pairing.verified
    assert len(data.runs) == 9 and len(data.runs[0].curve) == 3
    (tmp_path / "report.json").write_text(report.json.read_text())
    again = write_report(tmp_path)
    assert again.html.read_text() == report.html.read_text()
    for path in report.files:
        assert (tmp_path / path.relative_to(report.html.parent)).read_bytes() == path.read_bytes()


def test_the_page_says_what_the_numbers_say(report: Report) -> None:
    text = report.html.read_text()
    for arm in report.data.arms.values():
        if not arm.control:
            comparison = arm.charged["tokens"].comparison
            assert comparison is not None and comparison.ci95 is not None
            assert words.signed(comparison.mean_difference) in text
            assert words.interval(*comparison.ci95) in text
    assert "Is &lt;it&gt; better &amp; why?" in text and "<it>" not in text


def test_the_schema_describes_the_data(report: Report) -> None:
    schema = json.loads((report.html.parent / "report.schema.json").read_text())
    data = json.loads(report.json.read_text())
    assert set(schema["required"]) <= set(data) <= set(schema["properties"])


def test_a_report_before_any_run_has_finished(trainer: FakeTrainer) -> None:
    trainer.actions = {f"{arm}/{seed}": ["bad input"] for arm in trainer.study.arms for seed in trainer.study.replicates}
    trainer.run()
    report = write_report(trainer.folder)
    assert report.data.answer.startswith("No verdict yet: 0 of 3 replicates have finished")
    assert report.data.arms["delta"].verdict is None and not report.data.complete


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files and places of figures without drawing them, which other tests of this file do."""
    monkeypatch.setattr(Figure, "svg", lambda figure: "")
    monkeypatch.setattr(Figure, "png", lambda figure: b"")
    monkeypatch.setattr(Figure, "inline", lambda figure, width: "")


@pytest.mark.usefixtures("undrawn")
def test_broken_pairs_stand_out(trainer: FakeTrainer) -> None:
    trainer.actions["delta/1"] = ["other start"]
    trainer.run()
    report = write_report(trainer.folder)
    assert "ERROR: the pairing is broken" in report.html.read_text()
    assert not report.data.pairing.verified


def test_no_study_no_report(trainer: FakeTrainer, tmp_path: Path) -> None:
    with pytest.raises(StudyError, match="holds no study and no report"):
        write_report(trainer.folder)
    (tmp_path / "report.json").write_text('{"version": "twoaxis.report/1"}')
    with pytest.raises(StudyError, match=r"report.json: cannot be read .*must be a report of twoaxis.report/2"):
        write_report(tmp_path)


@pytest.mark.usefixtures("undrawn")
def test_what_a_report_no_longer_shows_is_removed(trainer: FakeTrainer) -> None:
    trainer.spread(delta=-0.1)
    trainer.run()
    before = write_report(trainer.folder)
    assert all(any(fnmatch(path.stem, name) for name in NAMES) for path in before.files if path.suffix in (".svg", ".png"))
    own = trainer.folder / "figures" / "of-mine.png"
    own.write_bytes(b"")
    (trainer.folder / "runs/plain/seed-1/result.json").unlink()
    after = write_report(trainer.folder)
    gone = {path.name for path in before.files if path not in after.files}
    assert {"differences.svg", "differences.png"} <= gone
    found = {path for folder in ("figures", "tables") for path in (trainer.folder / folder).iterdir()}
    assert found == {own} | {path for path in after.files if path.parent != trainer.folder}


def test_a_report_needs_neither_text_nor_tokenizer(study_data: dict[str, Any], tmp_path: Path) -> None:
    """A folder may be copied to a machine without them."""
    text, tokenizer = tmp_path / "text.txt", tmp_path / "tokenizer.json"
    text.write_text("a line of text that is not very long\n" * 200)
    byte_tokenizer("<|end|>").save(str(tokenizer))
    data = study_data["base"]["data"]
    data |= {"corpus": str(text), "tokenizer": {"kind": "file", "path": str(tokenizer), "end_of_document": "<|end|>"}}
    record = prepare(data["corpus"], data["tokenizer"]).to_data()
    trainer = FakeTrainer(StudyConfig.from_data(study_data), tmp_path / "study", tmp_path / "script.json", data=record)
    trainer.spread(delta=-0.1)
    trainer.run()
    before = read_study_folder(trainer.folder)
    text.unlink()
    tokenizer.unlink()
    assert read_study_folder(trainer.folder).replace(made=before.made) == before
