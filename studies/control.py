"""`python studies/control.py`: how the control of our studies was tuned, and the default scale of embeddings chosen.

Trains the plain decoder once for every line of the grids below, with a seed that is no replicate of any study, and writes
studies/results/control.csv. Runs that the table holds are not made again.

With its better rate, each way to scale embeddings ends at (nats per token, one seed):

width  0.02   0.5/sqrt(d)  1/sqrt(d)  2/sqrt(d)  norm
32     4.695  4.509        4.524      4.722      4.487
64     4.443  4.244        4.212      4.378      4.253
96     4.710  4.126        4.135      4.253      4.105
mean   4.616  4.293        4.290      4.451      4.282

So 0.02 and 2/sqrt(d) are out, and the other three are within the spread of seeds (0.03 in `shortcut`). The default is the best
of the scales without a norm, 1/sqrt(d_model), so that the plain decoder stays plain; a norm is an option.
"""

import csv
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from twoaxis.core.files import replacing

TABLE = Path(__file__).parent / "results" / "control.csv"
SEED, TOKENS, BATCH, SEQ_LEN = 901, 500_000, 8, 128

BASE: dict[str, Any] = {
    "d_model": 64,
    "embedding": "1/sqrt(d_model)",
    "lr": 1e-2,
    "batch_size": BATCH,
    "warmup": 0.05,
    "weight_decay": 0.1,
    "beta2": 0.95,
}
"""Of the control of `shortcut` and `fork`."""

ONE_AT_A_TIME: dict[str, tuple[Any, ...]] = {
    "lr": (5e-3, 2e-2),
    "batch_size": (4, 16),
    "warmup": (0.02, 0.1),
    "weight_decay": (0.0, 0.3),
    "beta2": (0.99,),
}
"""Changes of the recipe, each alone."""

WIDTHS, RATES = (32, 64, 96), (5e-3, 1e-2)
EMBEDDINGS = ("0.02", "0.5/sqrt(d_model)", "1/sqrt(d_model)", "2/sqrt(d_model)", "norm")
"""How tokens enter the stack: the standard deviation of the embedding, or 0.02 behind an RMSNorm."""

COLUMNS = (*BASE, "validation_loss")


def grid() -> Iterator[dict[str, Any]]:
    """The recipes in the order they are run, each once."""
    yield BASE
    for key, values in ONE_AT_A_TIME.items():
        yield from ({**BASE, key: value} for value in values)
    for width in WIDTHS:
        for embedding in EMBEDDINGS:
            yield from ({**BASE, "d_model": width, "embedding": embedding, "lr": lr} for lr in RATES)


def train(recipe: dict[str, Any]) -> float:
    """The validation loss of one run, in nats per token."""
    steps = -(-TOKENS // (recipe["batch_size"] * SEQ_LEN))
    width, embedding = recipe["d_model"], recipe["embedding"]
    scale, of_width, _ = embedding.partition("/sqrt")
    model: dict[str, Any] = {"d_model": width, "n_layers": 4, "max_seq_len": SEQ_LEN}
    model["blocks"] = [[{"kind": "attention", "n_heads": width // 32}, {"kind": "swiglu", "d_ff": width * 11 // 4}]]
    if embedding == "norm":
        model |= {"embedding_norm": "rms", "embedding_std": 0.02}
    else:
        model["embedding_std"] = float(scale) / width**0.5 if of_width else float(scale)
    data = {"corpus": "sotu", "tokenizer": {"kind": "bpe", "vocab_size": 1024}, "seq_len": SEQ_LEN}
    optimizer = {"lr": recipe["lr"], "weight_decay": recipe["weight_decay"], "betas": [0.9, recipe["beta2"]]}
    whole = {
        "model": model,
        "data": data,
        "optimizer": optimizer,
        "schedule": {"kind": "cosine", "warmup_steps": round(recipe["warmup"] * steps)},
        "batch_size": recipe["batch_size"],
        "steps": steps,
        "seed": SEED,
        "validate_every": steps,
        "validation_tokens": 32768,
        "checkpoint_every": steps,
        "device": "cpu",
    }
    with tempfile.TemporaryDirectory() as folder:
        (file := Path(folder) / "recipe.json").write_text(json.dumps(whole))
        command = [sys.executable, "-m", "twoaxis", "train", str(file), "--run", f"{folder}/run"]
        subprocess.run(command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        return json.loads((Path(folder) / "run" / "result.json").read_text())["validation_loss"]


def main() -> None:
    """Runs what is missing, two at a time."""
    done = _read()

    def run(recipe: dict[str, Any]) -> None:
        key = tuple(str(recipe[name]) for name in BASE)
        if key not in done:
            done[key] = f"{train(recipe):.4f}"
            print(*key, done[key], file=sys.stderr, flush=True)
            _write(done)

    with ThreadPoolExecutor(2) as workers:
        list(workers.map(run, grid()))


def _read() -> dict[tuple[str, ...], str]:
    if not TABLE.exists():
        return {}
    with open(TABLE, encoding="utf-8", newline="") as file:
        return {tuple(row[name] for name in BASE): row["validation_loss"] for row in csv.DictReader(file)}


def _write(done: dict[tuple[str, ...], str]) -> None:
    lines = [COLUMNS, *((*key, done[key]) for recipe in grid() if (key := tuple(map(str, recipe.values()))) in done)]
    unique = list(dict.fromkeys(",".join(map(str, line)) for line in lines))
    with replacing(TABLE) as file:
        file.write(("\n".join(unique) + "\n").encode())


if __name__ == "__main__":
    main()
