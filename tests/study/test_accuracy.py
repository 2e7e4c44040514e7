"""A study of a synthetic task shows the accuracy of its arms; a study of text does not."""

import dataclasses

from twoaxis.study.page import render_page
from twoaxis.study.report import Report
from twoaxis.study.report.text_tables import accuracy_rows

from .scripted import FakeTrainer


def test_accuracies_are_shown_by_arm(trainer: FakeTrainer) -> None:
    accuracies = {"plain": (0.25, 0.3, 0.35), "delta": (1.0, 0.9, 0.8), "local": (0.5, 0.5, 0.5)}
    records = {}
    for key, record in trainer.run().items():
        assert record.result is not None
        result = record.result.replace(validation_accuracy=accuracies[key.arm][key.seed])
        records[key] = dataclasses.replace(record, result=result)
    data = trainer.analyse(records)
    assert accuracy_rows(data) == [
        ["plain", "30.0 %", "25.0 %, 30.0 %, 35.0 %"],
        ["delta", "90.0 %", "100.0 %, 90.0 %, 80.0 %"],
        ["local", "50.0 %", "50.0 %, 50.0 %, 50.0 %"],
    ]
    assert data.arms["delta"].accuracies == {"0": 1.0, "1": 0.9, "2": 0.8}
    assert "90.0 %" in render_page(data, [])


def test_without_answers_there_are_none(report: Report) -> None:
    assert accuracy_rows(report.data) == []
    assert report.data.arms["delta"].accuracies == {}
