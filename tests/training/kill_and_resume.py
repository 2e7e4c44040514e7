"""Kills `twoaxis train` at random moments, resumes it, and compares it bit for bit with one that was never killed.

    python tests/training/kill_and_resume.py --kills 20

A third of the kills wait for a checkpoint that is being written, a third for some steps, the others for a random
moment after the process starts. When a run ends before all kills are done, it is compared and another one begins.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

from twoaxis.train import StepRecord, TrainConfig, read_metrics

STEPS = 40
MOMENTS = ("while starting", "in a step", "in a checkpoint")


def write_recipe(folder: Path) -> Path:
    """Writes a recipe whose steps and checkpoints take long enough to be hit."""
    chance = random.Random(0)
    words = ["".join(chance.choice("abcdefgh") for _ in range(chance.randint(1, 6))) for _ in range(40)]
    corpus = folder / "corpus.txt"
    corpus.write_text(" ".join(chance.choice(words) for _ in range(5000)))
    config = TrainConfig.from_data(
        {
            "model": {"d_model": 64, "n_layers": 2, "depth": "deep_delta"},
            "data": {"corpus": str(corpus), "seq_len": 32},
            "schedule": {"kind": "wsd", "warmup_steps": 7},
            "batch_size": 8,
            "micro_batch_size": 3,
            "steps": STEPS,
            "validate_every": 5,
            "validation_tokens": 200,
            "checkpoint_every": 2,
            "keep_checkpoints": 2,
            "device": "cpu",
        }
    )
    recipe = folder / "recipe.json"
    recipe.write_text(config.model_dump_json())
    return recipe


def start(recipe: Path, run: Path) -> subprocess.Popen[bytes]:
    """Starts a process that trains."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TWOAXIS_CACHE": str(recipe.parent / "cache")}
    command = [sys.executable, "-m", "twoaxis", "train", str(recipe), "--run", str(run)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def kill_at(moment: str, process: subprocess.Popen[bytes], run: Path, chance: random.Random) -> bool:
    """Waits for the moment and kills the process; tells whether it was still alive."""
    if moment == "while starting":
        wait = time.monotonic() + chance.uniform(0.0, 4.0)
        wait_until(lambda: time.monotonic() >= wait, process)
    elif moment == "in a step":
        wait_until(count_of(lambda: steps_in(run), chance.randint(1, 9)), process)
        time.sleep(chance.uniform(0.0, 0.05))
    else:
        wait_until(count_of(lambda: len(drafts_in(run)), chance.randint(1, 4)), process)
        # Somewhere between the first byte and the rename.
        time.sleep(chance.choice([0.0, 0.001, 0.002, 0.004]))
    alive = process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    return alive


def wait_until(reached: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    """Waits while the process lives."""
    while process.poll() is None and not reached():
        time.sleep(0.0005)


def count_of(number: Callable[[], int], times: int) -> Callable[[], bool]:
    """Tells whether the number has grown so many times since the first call."""
    last, grown = number(), 0

    def reached() -> bool:
        nonlocal last, grown
        now = number()
        grown, last = grown + (now > last), now
        return grown >= times

    return reached


def steps_in(run: Path) -> int:
    """Lines in the metrics."""
    metrics = run / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def drafts_in(run: Path) -> list[Path]:
    """Checkpoints that are being written."""
    return list((run / "checkpoints").glob(".step-*.tmp"))


def measured(run: Path) -> list[StepRecord]:
    """The metrics without their clock."""
    return [record._replace(seconds=0.0) for record in read_metrics(run / "metrics.jsonl")]


def differences(whole: Path, run: Path) -> list[str]:
    """What differs between two finished runs, in words."""
    found = []
    one, other = measured(whole), measured(run)
    if one != other:
        steps = [a.step for a, b in zip(one, other, strict=False) if a != b]
        found.append(f"metrics differ at steps {steps[:5]}, lengths {len(one)} and {len(other)}")
    for name in ("model", "optimizer"):
        path = Path("checkpoints") / f"step-{STEPS:08d}" / f"{name}.safetensors"
        a, b = load_file(whole / path), load_file(run / path)
        if a.keys() != b.keys() or not all(torch.equal(a[key], b[key]) for key in a):
            found.append(f"{name} differs after the last step")
    leftovers = [path.name for path in (run / "checkpoints").iterdir() if not path.name.startswith("step-")]
    return found + ([f"left behind: {leftovers}"] if leftovers else [])


def finish(recipe: Path, run: Path) -> None:
    """Runs to the end."""
    process = start(recipe, run)
    if process.wait():
        raise SystemExit(f"training failed with exit code {process.returncode}")


def main() -> int:
    """Runs the whole test; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=3, help="how many times to kill (default: 3)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default: 0)")
    arguments = parser.parse_args()
    chance = random.Random(arguments.seed)
    bad: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe = write_recipe(folder)
        finish(recipe, folder / "whole")
        killed: Counter[str] = Counter()
        number = 1
        while killed.total() < arguments.kills:
            run = folder / f"run{number}"
            moment = MOMENTS[killed.total() % len(MOMENTS)]
            alive = kill_at(moment, start(recipe, run), run, chance)
            if alive:
                killed[moment] += 1
                torn = ", left a half-written checkpoint" if drafts_in(run) else ""
                print(f"kill {killed.total()} of {arguments.kills}: {moment}, after step {steps_in(run)}{torn}", flush=True)
            if (run / "result.json").exists():
                bad += differences(folder / "whole", run)
                number += 1
        finish(recipe, run)
        bad += differences(folder / "whole", run)
        print(f"{killed.total()} kills ({', '.join(f'{count} {what}' for what, count in killed.items())})")
    print("\n".join(bad) if bad else "every resumed run equals the uninterrupted one bit for bit")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
