"""The command line of lm-eval itself runs an export, and says what ours says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lm_eval", reason="needs the extra twoaxis[evaluate]")
pytest.importorskip("transformers", reason="needs the extra twoaxis[hf]")
pytest.importorskip("accelerate", reason="lm-eval's own model needs it")

from twoaxis.interop.evaluate import open_tasks, run_tasks
from twoaxis.interop.hugging_face import export_folder

from ..hf_models import small_decoder
from ..small_tokenizer import subword

EXAMPLES = Path(__file__).parents[3] / "examples" / "evaluate"
TASKS = ("idioms", "sentences")


def test_lm_eval_runs_an_export_with_its_line_of_code(tmp_path: Path) -> None:
    decoder = small_decoder("streams", vocab_size=280, max_seq_len=512).float()
    folder = export_folder(decoder, tmp_path / "hf", subword(), code=True)
    command = [sys.executable, "-m", "lm_eval", "--model", "hf", "--device", "cpu", "--batch_size", "1"]
    command += ["--model_args", f"pretrained={folder},trust_remote_code=True,dtype=float32"]
    command += ["--tasks", ",".join(TASKS), "--include_path", ".", "--output_path", str(tmp_path / "out.json")]
    environment = {name: str(tmp_path / name) for name in ("HF_HOME", "HF_MODULES_CACHE", "HF_DATASETS_CACHE")}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(command, cwd=EXAMPLES, env={**os.environ, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    [written] = tmp_path.glob("out*.json")
    theirs = json.loads(written.read_text())["results"]
    ours = run_tasks(decoder, subword(), open_tasks(TASKS, EXAMPLES))["tasks"]
    for name in TASKS:
        for metric, found in ours[name]["metrics"].items():
            assert found["value"] == pytest.approx(theirs[name][metric], rel=1e-4), (name, metric)
