"""Folders that verbs must not read from or write to: damaged, of something else, or with a path that is no UTF-8."""

import os
from pathlib import Path

import pytest

from twoaxis import Decoder, DecoderConfig
from twoaxis.cli import main
from twoaxis.data.tokenizer import ByteTokenizer
from twoaxis.train import load_trained, save_trained
from twoaxis.train.checkpoint import Checkpoint, save_checkpoint
from twoaxis.train.training_state import model_tensors

NOT_UTF8 = os.fsdecode(b"caf\xe9")
MODEL = "model = {d_model = 16, n_layers = 1}\n"
RECIPE = f"steps = 1\n{MODEL}"
STUDY = f"""
question = "?"
control = "plain"
replicates = [0, 1]
arms = {{plain = {{}}, delta = {{model = {{depth = "deep_delta"}}}}}}
budget = {{steps = 2}}
decision = {{smallest_effect = 0.1}}
base.{MODEL}
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with the checkpoints 0 and 1, of which the newest is damaged."""
    blocks = [[{"kind": "attention", "n_heads": 2}, "swiglu"]]
    model = Decoder.build(DecoderConfig.from_data({"vocab_size": 256, "d_model": 8, "n_layers": 1, "blocks": blocks}))
    folder = save_trained(tmp_path / "run", model, ByteTokenizer())
    save_checkpoint(folder / "checkpoints", Checkpoint(1, model_tensors(model), {}, {}), keep=2)
    os.truncate(folder / "checkpoints" / "step-00000001" / "model.safetensors", 100)
    return folder


def error_of(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main([str(word) for word in words]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1, captured
    return captured.err.strip()


@pytest.mark.parametrize(
    "words",
    [
        ["export", "RUN", "--out", "OUT"],
        ["generate", "RUN"],
        ["evaluate", "RUN", "--text", "TEXT"],
        ["audit", "RUN"],
        ["retrofit", "RUN", "--sequence", "short_conv", "--out", "OUT"],
    ],
    ids=lambda words: words[0],
)
def test_a_damaged_newest_checkpoint_is_refused(words: list[str], run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a verb that takes an older model and says so only on the way."""
    if words[0] == "export":
        pytest.importorskip("transformers", reason="needs the extra twoaxis[hf]")
    (run.parent / "text").write_text("some words")
    named = {"RUN": run, "OUT": run.parent / "out", "TEXT": run.parent / "text"}
    found = error_of(capsys, *(named.get(word, word) for word in words))
    assert found.startswith(
        "twoaxis: checkpoint step-00000001 is damaged: model.safetensors differs from its checksum; restore it"
    )
    assert found.endswith("or ask for step-00000000 with --step 0") and not named["OUT"].exists()


def test_an_older_checkpoint_is_used_when_it_is_asked_for(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(run), "--step", "0", "--max-new-tokens", "1", "--json"]) == 0
    assert '"step": 0' in capsys.readouterr().out
    assert "step=5: must be one of a checkpoint of" in error_of(capsys, "generate", run, "--step", 5)
    message = f"step=1: must be left out, since {run.parent} is no run folder; name a run, or leave it out"
    assert message in error_of(capsys, "generate", run.parent, "--step", 1)


@pytest.mark.parametrize(
    ("verb", "option", "text"), [("study", "--out", STUDY), ("train", "--run", RECIPE)], ids=["study", "train"]
)
def test_a_folder_of_something_else_is_refused(
    verb: str, option: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.toml").write_text(text)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "metrics.jsonl").write_text("numbers of mine\n")
    what = {"study": "study", "train": "run"}[verb]
    found = error_of(capsys, verb, tmp_path / "in.toml", option, tmp_path / "mine")
    assert f"{what} folder {tmp_path / 'mine'}: holds 'metrics.jsonl' and no {what}: must be new, empty or that of an" in found
    assert [path.read_text() for path in (tmp_path / "mine").iterdir()] == ["numbers of mine\n"]


@pytest.mark.parametrize(
    "words",
    [
        ["train", "recipe.toml", "--run", "ODD/run"],
        ["study", "study.toml", "--out", "ODD/study"],
        ["export", "run", "--step", "0", "--out", "ODD/hf"],
        ["import", "ODD", "--out", "ODD/run"],
        ["retrofit", "run", "--step", "0", "--sequence", "short_conv", "--out", "ODD/run"],
        ["generate", "ODD"],
        ["audit", "ODD"],
    ],
    ids=lambda words: words[0],
)
def test_a_path_that_is_not_utf8_is_said_before_anything_is_done(
    words: list[str], run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a run that trains there and whose checkpoints nobody can read, and a trace in an export."""
    if words[0] in ("export", "import"):
        pytest.importorskip("transformers", reason="needs the extra twoaxis[hf]")
    monkeypatch.chdir(run.parent)
    odd = Path(NOT_UTF8)
    (odd / "checkpoints").mkdir(parents=True)
    Path("recipe.toml").write_text(RECIPE)
    Path("study.toml").write_text(STUDY)
    found = error_of(capsys, *(word.replace("ODD", NOT_UTF8) for word in words))
    assert f"folder {run.parent}/caf\\xe9" in found and "the path must be UTF-8; rename the folder, or choose another" in found
    assert [path.name for path in odd.rglob("*")] == ["checkpoints"]


def test_a_text_and_a_study_file_may_have_any_path(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run.parent / NOT_UTF8).write_text("some words")
    words = ["evaluate", str(run), "--step", "0", "--text", str(run.parent / NOT_UTF8)]
    assert main(words) == 0 and "caf\\xe9" in capsys.readouterr().out
    assert load_trained(run, 0).step == 0
