"""Hugging Face Trainer on two ranks trains our models as one process does, and its folders come back."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra twoaxis[hf]")
pytest.importorskip("accelerate", reason="needs the package accelerate")

import twoaxis
from twoaxis.cli import main

from ...distributed.processes import run_processes
from ..hf_models import small_decoder
from . import trainer_worker

TOKENS = torch.arange(12).unsqueeze(0)


def test_ddp_and_fsdp2_equal_one_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a depth mixer that wrappers or sharded parameters change, and folders that do not come back."""
    models = {name: small_decoder(name).float() for name in trainer_worker.MODELS}
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        (tmp_path / "port").write_text(str(free.getsockname()[1]))
    run_processes(Path(trainer_worker.__file__), tmp_path, 2, timeout_seconds=300)
    found = json.loads((tmp_path / "found.json").read_text())
    last = f"checkpoint-{trainer_worker.STEPS}"
    for name, before in models.items():
        trainer, expected = trainer_worker.trained(tmp_path / name, tmp_path / f"{name}-one", 1)
        after: Any = trainer.model
        logits = after.eval()(TOKENS).logits
        for way in ("one", "ddp", "fsdp"):
            if way != "one":
                torch.testing.assert_close(torch.tensor(found[f"{name}-{way}"]), torch.tensor(expected), rtol=1e-5, atol=1e-6)
            loaded = twoaxis.load(tmp_path / f"{name}-{way}" / last)
            assert loaded.config == before.config and loaded.tokenizer is None
            torch.testing.assert_close(loaded(TOKENS), logits, rtol=1e-4, atol=1e-4)
        assert (logits - before(TOKENS)).abs().max() > 1e-2, "training moves it"
    folder = str(tmp_path / f"{trainer_worker.MODELS[0]}-fsdp" / last)
    capsys.readouterr()
    assert main(["import", folder, "--out", str(tmp_path / "run")]) == 2
    assert "--tokenizer" in capsys.readouterr().err
    assert main(["import", folder, "--out", str(tmp_path / "run"), "--tokenizer", "bytes"]) == 2
    assert "tokens of the tokenizer=256: must be at most the model's vocab_size=40" in capsys.readouterr().err
