"""`twoaxis audit`: the file it writes, what it prints, and its one-line errors."""

import json
from pathlib import Path

import pytest

from twoaxis import TokenLayout
from twoaxis.audit import audit_run, read_audit
from twoaxis.cli import main
from twoaxis.core.errors import CheckpointError
from twoaxis.data import prepare, validation_batches
from twoaxis.train import load_trained
from twoaxis.train.run_folder import RunFolder

from .toy import run_folder


def error_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = [line for line in captured.err.strip().splitlines() if line.startswith("twoaxis:")]
    assert len(lines) == 1, captured.err
    return lines[0]


def test_audits_a_run_and_keeps_the_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_folder(tmp_path, {"kind": "attention_residuals", "block_size": 2})
    assert read_audit(run) is None
    assert main(["audit", str(run), "--tokens", "100", "--json"]) == 0
    captured = capsys.readouterr()
    printed = json.loads(captured.out)
    assert "ablating" not in captured.out
    found = read_audit(run)
    assert found is not None
    assert found.to_data() == printed == json.loads((run / "audit.json").read_text())
    # 100 tokens are 7 windows of 16.
    assert (found.step, found.tokens, found.sequences, found.depth) == (7, 112, 7, "attention_residuals")
    assert found.sublayers[3].kind == "swiglu"
    assert [one.name for one in run.iterdir() if one.name.startswith(".audit")] == []


def test_prints_tables_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_folder(tmp_path, "deep_delta")
    assert main(["audit", str(run), "--tokens", "64"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for words in (
        "deep_delta after 7 steps, loss ",
        "0 attention",
        "3 swiglu",
        "delta writes",
        "near 0",
        "attention by distance",
    ):
        assert words in out
    assert "no weighted sum of depth sources" in out


def test_the_loss_is_that_of_training(tmp_path: Path) -> None:
    run = run_folder(tmp_path)
    found = audit_run(run, tokens=160)
    trained = load_trained(run)
    data = trained.config.data
    prepared = prepare(data.corpus, data.tokenizer)
    total = count = 0.0
    for batch in validation_batches(prepared.validation, 4, 16, 160, data.packing):
        assert batch.documents is not None
        loss, n = trained.model.loss(batch.tokens, batch.targets, TokenLayout.packed(batch.documents))
        total, count = total + loss.item(), count + n.item()
    assert found.loss == pytest.approx(total / count, rel=1e-5)


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "--help"]) == 0
    assert "Example: twoaxis audit runs/delta" in " ".join(capsys.readouterr().out.split())


def test_errors_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no-such-run" in error_of(capsys, "audit", "no-such-run")
    run = run_folder(tmp_path)
    assert "tokens=0: must be at least 1" in error_of(capsys, "audit", str(run), "--tokens", "0")
    text = tmp_path / "text.txt"
    written = text.read_text()
    text.write_text(written.replace("small", "large"))
    assert "corpus of run folder" in error_of(capsys, "audit", str(run))
    text.unlink()
    assert "text.txt" in error_of(capsys, "audit", str(run))
    text.write_text(written)
    RunFolder(run).write("result", _result("diverged"))
    assert "has diverged; must be sound" in error_of(capsys, "audit", str(run))
    (run / "result.json").unlink()
    (run / "checkpoints" / "step-00000007").rename(tmp_path / "elsewhere")
    assert "has no checkpoint yet" in error_of(capsys, "audit", str(run))


def test_a_damaged_audit_is_refused(tmp_path: Path) -> None:
    run = run_folder(tmp_path)
    (run / "audit.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"audit\.json: cannot be read"):
        read_audit(run)
    (run / "audit.json").write_text('{"format": 2}')
    with pytest.raises(CheckpointError, match=r"audit\.json: is no audit of this version \(.*\); audit the run again"):
        read_audit(run)


def _result(status: str) -> dict[str, object]:
    counts = ("steps", "tokens", "target_tokens", "parameters", "peak_memory_bytes", "peak_device_memory_bytes")
    none = dict.fromkeys(("validation_loss", "best_validation_loss", "bpb", "tokens_per_second", "step_seconds"))
    rates = dict.fromkeys(("forward_flops_per_token", "training_flops_per_token", "train_seconds"), 1.0)
    return {"status": status, "message": "", **dict.fromkeys(counts, 1), **none, **rates}
