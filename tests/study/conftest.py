"""A tiny study on a tiny corpus, and a trainer that follows a script instead of training."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ..made_once import made_once

if TYPE_CHECKING:
    from twoaxis.study import StudyConfig
    from twoaxis.study.report import Report

    from .scripted import FakeTrainer


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    corpus = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    corpus.write_text("a line of text that is not very long\n" * 200)
    return corpus


@pytest.fixture
def study_data(corpus: Path) -> dict[str, Any]:
    return tiny_study(corpus)


def tiny_study(corpus: Path) -> dict[str, Any]:
    return {
        "question": "Is <it> better & why?",
        "control": "plain",
        "arms": {
            "plain": {},
            "delta": {"model": {"depth": "deep_delta"}},
            "local": ['model.blocks=[["short_swa", "attention", "swiglu"]]'],
        },
        "base": {
            "model": {"d_model": 16, "n_layers": 1, "max_seq_len": 16},
            "data": {"corpus": str(corpus), "seq_len": 16},
            "batch_size": 4,
            "validate_every": 2,
        },
        "replicates": [0, 1, 2],
        "budget": {"steps": 6},
        "decision": {"smallest_effect": 0.05},
    }


@pytest.fixture
def study(study_data: dict[str, Any]) -> "StudyConfig":
    from twoaxis.study import StudyConfig

    return StudyConfig.from_data(study_data)


@pytest.fixture
def trainer(study: "StudyConfig", tmp_path: Path) -> "FakeTrainer":
    from .scripted import FakeTrainer

    return FakeTrainer(study, tmp_path / "study", tmp_path / "script.json")


def tiny_trainer(corpus: Path, folder: Path) -> "FakeTrainer":
    from twoaxis.study import StudyConfig

    from .scripted import FakeTrainer

    return FakeTrainer(StudyConfig.from_data(tiny_study(corpus)), folder / "study", folder / "script.json")


@pytest.fixture(scope="session")
def finished_folder(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny study, finished; copy it, never change it."""
    trainer = tiny_trainer(corpus, tmp_path_factory.mktemp("finished"))
    trainer.run()
    return trainer.folder


@pytest.fixture
def finished(trainer: "FakeTrainer", finished_folder: Path) -> "FakeTrainer":
    """A trainer of the tiny study whose runs are all there already."""
    shutil.copytree(finished_folder, trainer.folder)
    return trainer


@pytest.fixture(scope="session")
def drawn_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of the made-up report, which takes seconds to draw; read it only."""

    def draw(folder: Path) -> None:
        from .report_example import example_page

        (folder / "report.html").write_text(example_page(), encoding="utf-8")

    return made_once(tmp_path_factory, "drawn_page", draw) / "report.html"


@pytest.fixture(scope="session")
def report(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> "Report":
    """A report in which one arm is better and one undecided; read it only."""
    from twoaxis.study.report import write_report

    trainer = tiny_trainer(corpus, tmp_path_factory.mktemp("reported"))
    trainer.spread(delta=-0.1, local=0.0001)
    trainer.run()
    return write_report(trainer.folder)
