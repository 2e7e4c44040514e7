"""A run that another study has made is used, and the report says so; a run that differs in anything is made anew."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from twoaxis.data import prepare
from twoaxis.study import StudyConfig
from twoaxis.study.report import read_study_folder
from twoaxis.study.running.engine import LocalEngine
from twoaxis.study.running.study_folder import RunKey, StudyFolder
from twoaxis.train.environment import describe_environment
from twoaxis.train.token_loss import choose_device, choose_dtype

from .scripted import FakeTrainer


@pytest.fixture
def first(finished: FakeTrainer) -> FakeTrainer:
    """A study whose runs were made here, of its text and by this code."""
    _claim_as_ours(finished)
    return finished


def _claim_as_ours(trainer: FakeTrainer) -> None:
    device = choose_device("auto")
    here = describe_environment(device, choose_dtype("auto", device))
    for name, content in (("env", here), ("data", _data(trainer.study))):
        for path in trainer.folder.glob(f"runs/*/seed-*/{name}.json"):
            path.write_text(json.dumps(content))


def _data(study: StudyConfig) -> dict[str, Any]:
    data = study.recipe(study.control, study.replicates[0]).data
    return prepare(data.corpus, data.tokenizer).to_data()


def _second(first: FakeTrainer, study_data: dict[str, Any], name: str = "second") -> FakeTrainer:
    data = {**study_data, "arms": {**study_data["arms"], "scalars": {"model": {"depth": "residual_scalars"}}}}
    study = StudyConfig.from_data(data)
    return FakeTrainer(study, first.folder.with_name(name), first.script, data=_data(study))


def test_runs_of_a_neighbour_are_used(first: FakeTrainer, study_data: dict[str, Any]) -> None:
    second = _second(first, study_data)
    records = second.run()
    assert second.order == ["scalars/0", "scalars/1", "scalars/2"], "only what the neighbour has not made"
    record = records[RunKey("delta", 1)]
    assert record.status == "finished" and record.reused_from == f"{first.folder.name}/runs/delta/seed-1"
    assert records[RunKey("scalars", 0)].reused_from == ""
    report = read_study_folder(second.folder)
    assert report.complete and report.spent["reused_runs"] == 9.0 and report.spent["runs"] == 3.0
    assert second.run() == records


@pytest.mark.parametrize("key", ["code", "threads", "kernels"])
def test_other_code_or_machine_is_not_the_same_run(first: FakeTrainer, study_data: dict[str, Any], key: str) -> None:
    for path in first.folder.glob("runs/*/seed-*/env.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), key: "another"}))
    second = _second(first, study_data)
    second.run()
    assert len(second.order) == 12


def test_a_text_that_has_changed_is_not_the_same_run(first: FakeTrainer, study_data: dict[str, Any], corpus: Path) -> None:
    text = corpus.read_text()
    corpus.write_text(text.replace("very", "too"))
    try:
        second = _second(first, study_data)
        second.run()
        assert len(second.order) == 12 and read_study_folder(second.folder).complete
    finally:
        corpus.write_text(text)


def test_another_recipe_is_not_the_same_run(first: FakeTrainer, study_data: dict[str, Any]) -> None:
    second = _second(first, {**study_data, "budget": {"steps": 8}})
    second.run()
    assert len(second.order) == 12


def test_the_neighbour_keeps_its_files(first: FakeTrainer, study_data: dict[str, Any]) -> None:
    before = {path: path.read_bytes() for path in first.folder.rglob("*") if path.is_file()}
    _second(first, study_data).run()
    assert {path: path.read_bytes() for path in first.folder.rglob("*") if path.is_file()} == before


def test_runs_at_once_compute_with_fewer_threads(first: FakeTrainer, study_data: dict[str, Any]) -> None:
    """Two runs at once share the cores, so that what they make is another run than one alone, and the same as another two."""
    cores = os.cpu_count() or 1
    for path in first.folder.glob("runs/*/seed-*/env.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "threads": max(1, cores // 2)}))
    second = _second(first, study_data)
    second.run(engine=LocalEngine(jobs=2))
    assert sorted(second.order) == ["scalars/0", "scalars/1", "scalars/2"]


def test_a_damaged_neighbour_is_passed_over(first: FakeTrainer, study_data: dict[str, Any]) -> None:
    (first.folder / "runs/delta/seed-1/result.json").write_text("{")
    second = _second(first, study_data)
    second.run()
    assert second.order[0] == "scalars/0" and "delta/1" in second.order
    assert StudyFolder(second.folder).record(RunKey("delta", 1)).status == "finished"


def test_runs_that_an_older_version_has_recorded_are_used_as_they_were_trained(
    trainer: FakeTrainer, study_data: dict[str, Any]
) -> None:
    """Two scalars had one form and no option; that form is `raw` now, and the default is another run."""
    first = _second(trainer, study_data, "older")
    first.study = _with_scalars(study_data, {"kind": "residual_scalars", "embedding": "raw"})
    first.run()
    _claim_as_ours(first)
    for path in [*first.folder.glob("runs/scalars/seed-*/config.json"), first.folder / "plan.json"]:
        path.write_text(json.dumps(_as_older(json.loads(path.read_text()))))
    raw = FakeTrainer(first.study, first.folder.with_name("raw"), first.script)
    records = raw.run()
    assert all(records[RunKey("scalars", seed)].reused_from == f"older/runs/scalars/seed-{seed}" for seed in range(3))
    today = FakeTrainer(_with_scalars(study_data, "residual_scalars"), first.folder.with_name("today"), first.script)
    today.run()
    assert today.order == ["scalars/0", "scalars/1", "scalars/2"]
    # And the older folder goes on by its own plan.
    assert (
        StudyFolder(first.folder).recipe_of(StudyFolder(first.folder).plan.arm("scalars"), 0).model["depth"]["embedding"]
        == "raw"
    )
    assert read_study_folder(first.folder).complete


def _with_scalars(study_data: dict[str, Any], depth: Any) -> StudyConfig:
    return StudyConfig.from_data({**study_data, "arms": {**study_data["arms"], "scalars": {"model": {"depth": depth}}}})


def _as_older(data: Any) -> Any:
    """The same without the options that residual scalars had not yet."""
    if isinstance(data, dict):
        if data.get("kind") == "residual_scalars":
            return {"kind": "residual_scalars"}
        return {key: _as_older(value) for key, value in data.items()}
    return [_as_older(value) for value in data] if isinstance(data, list) else data
