"""`twoaxis evaluate`: texts as tables, JSON and files, and one line for what is wrong. tests/interop has the tasks."""

import json
import math
import os
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from twoaxis import Decoder, DecoderConfig
from twoaxis.cli import main
from twoaxis.data.tokenizer import ByteTokenizer, SubwordTokenizer
from twoaxis.train import save_trained

TEXT = "line 1 of a text\r\nZoë, 日本\n" * 4


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    config = DecoderConfig(vocab_size=256, d_model=8, n_layers=1, max_seq_len=16)
    return save_trained(folder, Decoder.build(config), ByteTokenizer())


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes(TEXT.encode())
    return path


def evaluate(run: Path, *words: object) -> int:
    return main(["evaluate", str(run), *map(str, words)])


def test_a_text(run: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate(run, "--text", text) == 0
    out = capsys.readouterr().out
    assert "bits per byte" in out and "windows of 16 tokens, of which later ones score 8; first token: uniform" in out
    assert evaluate(run, "--text", text, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["model"], report["step"]) == (str(run), 0)
    [one] = report["text"]["texts"]
    assert one["tokens"] == one["text_bytes"] == len(TEXT.encode())
    assert one["bpb"] == pytest.approx(one["loss"] / math.log(2))
    assert one["perplexity"] == pytest.approx(math.exp(one["loss"]))


def test_what_the_tokenizer_loses_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    config = DecoderConfig(vocab_size=256, d_model=8, n_layers=1, max_seq_len=16)
    run = save_trained(tmp_path / "run", Decoder.build(config), SubwordTokenizer(engine.to_str()))
    (tmp_path / "text").write_text("ab, 日本")
    assert evaluate(run, "--text", tmp_path / "text") == 0
    assert "the tokenizer loses " in capsys.readouterr().out


def test_several_texts_and_a_file(run: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other, out = tmp_path / "other.txt", tmp_path / "new" / "out.json"
    other.write_text("another")
    words = ["--text", text, "--text", other, "--stride", "4", "--batch-size", "2", "--out", out]
    assert evaluate(run, *words, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert json.loads(out.read_text()) == report
    assert report["text"]["stride_tokens"] == 4
    assert report["text"]["total"]["text_bytes"] == len(TEXT.encode()) + 7
    assert [path.name for path in out.parent.iterdir()] == ["out.json"]


def test_bad_input_is_one_line(
    run: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    (tmp_path / "empty").touch()
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    for words, message in (
        ([], "nothing to evaluate; name a text with --text, or tasks with --tasks and --include"),
        (["--text", tmp_path / "none"], "none: cannot be read (No such file or directory); name a text in UTF-8"),
        (["--text", tmp_path], "cannot be read (Is a directory)"),
        (["--text", tmp_path / "empty"], "is empty"),
        (["--text", tmp_path / "latin"], "latin: byte 0xe9 at offset 3 is not UTF-8"),
        (
            ["--text", text, "--limit", "3"],
            "limit=3: must come with tasks, whose examples it limits; add --tasks, or leave it out",
        ),
        (
            ["--tasks", "a", "--include", tmp_path, "--stride", "4"],
            "stride=4: must come with a text, whose windows it moves; add --text, or leave it out",
        ),
        (["--text", text, "--stride", "17"], "stride=17: must be in 1..max_seq_len=16"),
        (["--text", text, "--include", tmp_path], "--include without --tasks"),
        (["--tasks", "one"], "--tasks without --include"),
        (
            ["--tasks", "one", "--include", tmp_path],
            "lm-eval is not installed: must be there for tasks; pip install 'twoaxis[evaluate]'",
        ),
    ):
        assert evaluate(run, *words) == 2
        captured = capsys.readouterr()
        assert message in captured.err and captured.out == ""
        assert len(captured.err.strip().splitlines()) == 1
    assert main(["evaluate", str(tmp_path / "no-such-run"), "--text", str(text)]) == 2
    assert "no-such-run" in capsys.readouterr().err


def test_a_name_that_is_not_utf_8(run: Path, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    path, out = tmp_path / os.fsdecode(b"caf\xe9"), tmp_path / "out.json"
    path.write_text("text")
    for words in ([], ["--json"]):
        assert evaluate(run, "--text", path, "--out", out, *words) == 0
        assert b"caf\\xe9" in capsysbinary.readouterr().out.replace(rb"\\", b"\\")
        assert json.loads(out.read_text())["text"]["texts"][0]["name"] == str(tmp_path / r"caf\xe9")
    path.write_bytes(b"")
    assert evaluate(run, "--text", path) == 2
    assert b"caf\\xe9: is empty" in capsysbinary.readouterr().err


def test_a_file_that_cannot_be_written_does_not_cost_the_result(
    run: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    assert evaluate(run, "--text", text, "--out", tmp_path / "out", "--json") == 2
    captured = capsys.readouterr()
    assert json.loads(captured.out)["text"]["total"]["tokens"]
    assert captured.err.endswith(
        "out: cannot be written (Is a directory), nothing was replaced; name another file with --out\n"
    )
    assert not list((tmp_path / "out").iterdir())
