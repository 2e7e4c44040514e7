"""The cache of trained tokenizers, also when two processes train at once."""

import subprocess
import sys
from pathlib import Path

import pytest

from twoaxis.core.errors import DataError
from twoaxis.data.corpus import Corpus, TextConfig
from twoaxis.data.tokenizer import BpeConfig, subword

TEXT = "the cat sat on the mat and the dog sat on the cat\n" * 10

TRAIN = """
import os, sys, time
from pathlib import Path
from twoaxis.data.corpus import Corpus, TextConfig
from twoaxis.data.tokenizer import BpeConfig, subword

folder = Path(sys.argv[1])
train = subword.train_bpe

def train_together(*arguments):
    definition = train(*arguments)
    (folder / me).touch()
    while not (folder / other).exists():
        time.sleep(0.01)
    return definition

# Forks of one process, which has loaded what both need.
first = os.fork()
me, other = ("a", "b") if first else ("b", "a")
subword.train_bpe = train_together
corpus = Corpus.open(TextConfig(path=folder / "corpus.txt"))
print(BpeConfig(vocab_size=270).build(corpus, folder / "cache").fingerprint, flush=True)
if first:
    sys.exit(os.waitpid(first, 0)[1])
"""


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    (tmp_path / "corpus.txt").write_text(TEXT)
    return Corpus.open(TextConfig(path=tmp_path / "corpus.txt"))


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_two_processes_that_train_at_once_use_one_file(corpus: Corpus, tmp_path: Path) -> None:
    command = [sys.executable, "-c", TRAIN, str(tmp_path)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120, check=True)
    one, other = done.stdout.split()
    assert one == other == BpeConfig(vocab_size=270).build(corpus, tmp_path / "cache").fingerprint
    assert len(files(tmp_path / "cache")) == 1


def test_the_first_complete_file_stays(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, cache = BpeConfig(vocab_size=270), tmp_path / "cache"
    train, other = subword.train_bpe, []

    def overtaken(*arguments) -> str:
        monkeypatch.setattr(subword, "train_bpe", lambda *_: train(corpus, 260))
        other.append(config.build(corpus, cache))
        return train(*arguments)

    monkeypatch.setattr(subword, "train_bpe", overtaken)
    assert config.build(corpus, cache).fingerprint == other[0].fingerprint
    assert len(files(cache)) == 1


def test_the_second_use_does_not_train(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = BpeConfig(vocab_size=270).build(corpus, tmp_path / "cache")
    monkeypatch.setattr(subword, "train_bpe", lambda *_: pytest.fail("trained again"))
    assert BpeConfig(vocab_size=270).build(corpus, tmp_path / "cache").fingerprint == first.fingerprint


def test_another_size_or_text_is_another_file(corpus: Corpus, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text(TEXT.replace("cat", "cow"))
    other = Corpus.open(TextConfig(path=tmp_path / "other.txt"))
    for size, text in ((270, corpus), (271, corpus), (270, other)):
        BpeConfig(vocab_size=size).build(text, tmp_path / "cache")
    assert len(files(tmp_path / "cache")) == 3


def test_the_cache_folder_can_be_chosen(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOAXIS_CACHE", str(tmp_path / "elsewhere"))
    BpeConfig(vocab_size=270).build(corpus)
    assert len(files(tmp_path / "elsewhere")) == 1


def test_a_damaged_file_is_named(corpus: Corpus, tmp_path: Path) -> None:
    BpeConfig(vocab_size=270).build(corpus, tmp_path / "cache")
    (path,) = files(tmp_path / "cache")
    path.write_text(path.read_text()[:100])
    with pytest.raises(DataError, match=rf"{path}: is not a tokenizer.json .* delete the file"):
        BpeConfig(vocab_size=270).build(corpus, tmp_path / "cache")


def test_a_cache_that_cannot_be_written_is_named(corpus: Corpus, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(DataError, match=r"cannot be written .* set TWOAXIS_CACHE to another folder"):
        BpeConfig(vocab_size=270).build(corpus, tmp_path / "cache")


def test_progress_reaches_the_training_side(corpus: Corpus, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    BpeConfig(vocab_size=270).build(corpus, tmp_path, lambda *report: seen.append(report))
    assert seen == [("training the tokenizer", 475, 500)]
