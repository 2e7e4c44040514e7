"""`python -m benchmarks.engines.titan_runs`: torchtitan's own trainer on two processes, against `twoaxis train`.

Each case is a recipe. One process of `twoaxis train` runs it; then two processes run it through torchtitan's trainer, which
builds the model from the same seed and reads the same batches. Compared are losses and gradient norms of every step, and the
weights that torchtitan writes after the last one.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from benchmarks.engines import kept
from twoaxis import Decoder
from twoaxis.interop.hugging_face import export_folder, to_hugging_face
from twoaxis.train import TrainConfig, load_trained, read_metrics, train

NAME = "torchtitan"
PACKAGES = ("torchtitan", "torch")
RANKS, STEPS = 2, 6
FACTS: dict[str, Any] = {
    "ranks": RANKS,
    "steps": STEPS,
    "collectives": "gloo",
    "allowed_loss_difference": 1e-5,
    "allowed_norm_difference": 1e-3,
    "allowed_weight_difference": 1e-4,
}
"""What holds for every run, and how far losses and norms may be from ours, relatively, and weights."""

DEPTHS = ("residual", "mhc", "deep_delta", "attention_residuals", "denseformer", "muddformer", "value_residual")

CASES: dict[str, dict[str, Any]] = {
    **{kind: {"depth": kind} for kind in DEPTHS},
    "untied": {"depth": "mhc", "untied": True},
    "partial_dtensor": {"depth": "mhc", "spmd_backend": "partial_dtensor"},
    "replicated": {"depth": "mhc", "replicate": 2},
    "recomputed": {"depth": "mhc", "recompute": True},
    "from_export": {"depth": "mhc", "untied": True, "from_export": True},
    "short_swa": {"depth": "residual", "blocks": [["short_swa", "attention", "swiglu"]]},
}
"""Recipes by name, all with the default `spmd_backend` but one."""


def main() -> int:
    """Runs the cases and keeps what they came to; with `--only`, those of some names, and the others as they were."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--only", nargs="*", default=[], choices=CASES, help="names of cases")
    only = parser.parse_args().only or list(CASES)
    found = {run["case"]: run for run in kept.read(NAME)["runs"]} if len(only) < len(CASES) else {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for case in only:
            (folder / case).mkdir()
            config = recipe(CASES[case], folder)
            train(config, folder / case / "ours")
            export_folder(Decoder.build(config.decoder(vocab_size=256), config.seed), folder / case / "export")
            (folder / case / "recipe.json").write_text(json.dumps(config.to_data()))
        run_ranks(only, folder)
        for case in only:
            found[case] = {"case": case, **CASES[case], **outcome(folder / case)}
            print(found[case], flush=True)
    kept.write(NAME, kept.header(*PACKAGES, **FACTS), [found[name] for name in CASES if name in found])
    return 0 if all(run["result"] == "equal" for run in found.values()) else 1


def recipe(case: dict[str, Any], folder: Path) -> TrainConfig:
    """A small run on short documents, isolated, so that ranks have different numbers of targets."""
    corpus = folder / "corpus.jsonl"
    if not corpus.exists():
        words = ("depth", "axis", "stream", "block", "layer", "source", "weight", "read", "write", "gate", "norm", "query")
        texts = (" ".join(words[n * k % 12] for k in range(3 + n * n % 7)) for n in range(900))
        corpus.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    model = {"d_model": 32, "n_layers": 4, "max_seq_len": 48, "depth": case["depth"], "tie_embeddings": not case.get("untied")}
    blocks = {"blocks": case["blocks"]} if "blocks" in case else {}
    data = {"corpus": str(corpus), "seq_len": 48}
    fields = {"schedule": {"kind": "constant", "warmup_steps": 0}, "batch_size": 8, "steps": STEPS, "validate_every": STEPS}
    fields |= {"validation_tokens": 200, "checkpoint_every": STEPS, "device": "cpu"}
    return TrainConfig.from_data({"model": {**model, **blocks}, "data": data, **fields})


def outcome(folder: Path) -> dict[str, Any]:
    """What came of a case: `equal`, `different` or `failed`, and how far losses, norms and weights were apart."""
    if not (folder / "losses.json").exists():
        error = folder / "error.txt"
        return {"result": "failed", "reason": error.read_text() if error.exists() else "the processes ended or hung"}
    ours = [[record.loss, record.grad_norm] for record in read_metrics(folder / "ours" / "metrics.jsonl")]
    theirs = json.loads((folder / "losses.json").read_text())
    loss, norm = (max(abs(a[i] - b[i]) / abs(a[i]) for a, b in zip(ours, theirs, strict=True)) for i in range(2))
    away = {"loss_difference": loss, "norm_difference": norm, "weight_difference": weights(folder)}
    equal = all(value <= FACTS[f"allowed_{name}"] for name, value in away.items())
    rounded = {name: float(f"{value:.1e}") for name, value in away.items()}
    return {"result": "equal" if equal else "different", **rounded, "losses": [round(step[0], 5) for step in theirs]}


def weights(folder: Path) -> float:
    """How far the weights of torchtitan's checkpoint, under the names of our exports, are from those of our run."""
    files = (folder / "theirs" / "checkpoint" / f"step-{STEPS}").glob("*.safetensors")
    theirs = {name: value for path in files for name, value in load_file(path).items()}
    model = load_trained(folder / "ours").model
    ours = to_hugging_face(model).state_dict()
    if model.config.tie_embeddings:
        del ours["lm_head.weight"]
    if ours.keys() != theirs.keys():
        raise ValueError(f"names of weights: {sorted(ours.keys() ^ theirs.keys())}")
    return max(float((ours[name] - theirs[name]).abs().max()) for name in theirs)


def run_ranks(names: list[str], folder: Path) -> None:
    """Runs all cases on all ranks, one after another; ends them when they hang."""
    common = {**os.environ, "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    cases = {name: {**CASES[name], "port": free_port()} for name in names}
    command = [sys.executable, "-m", "benchmarks.engines.titan_rank", str(folder), json.dumps(cases)]
    processes, logs = [], [folder / f"rank{rank}.log" for rank in range(RANKS)]
    try:
        for rank, log in enumerate(logs):
            environment = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            with log.open("wb") as said:
                processes.append(subprocess.Popen(command, env=environment, stdout=said, stderr=said))
        codes = [process.wait(timeout=120 + 60 * len(names)) for process in processes]
    except subprocess.TimeoutExpired:
        codes = [1]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    if any(codes):
        for log in logs:
            print(log.read_text()[-3000:], file=sys.stderr)


def free_port() -> int:
    """A port of this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


if __name__ == "__main__":
    raise SystemExit(main())
