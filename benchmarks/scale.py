"""A sharded run of GPT-2's small shape on two ranks: its own time in a step, its memory, and that of its checkpoints.

    torchrun --nproc-per-node 2 -m benchmarks.scale

Own time is the wall-clock time of a step in which neither an operation of torch nor a collective runs, by the profiler of torch,
median of the steps. Memory is counted from the tensors; that of a checkpoint is the growth of the peak of the process.
"""

import json
import os
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from twoaxis.train import Progress, StepRecord, TrainConfig
from twoaxis.train.parallel.ranks import Ranks, joined
from twoaxis.train.run_folder import RunFolder
from twoaxis.train.trainer import Trainer

STEPS = 3
SHAPE = {"d_model": 768, "n_layers": 12, "vocab_size": 50304, "max_seq_len": 512, "blocks": [["attention", "swiglu"]]}


def recipe(depth: str, ranks: int) -> TrainConfig:
    """Steps of two windows of 256 tokens."""
    return TrainConfig.from_data(
        {
            "model": {**SHAPE, "depth": depth},
            "data": {"seq_len": 256},
            "batch_size": 2,
            "steps": 100,
            "validation_tokens": 256,
            "device": "cpu",
            "parallel": {"shard": ranks},
        }
    )


def peak_mebibytes() -> float:
    """The largest resident memory of the process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def reset_peak() -> None:
    """Begins to measure it anew (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_now() -> float:
    """The peak since then."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024


def step(trainer: Trainer) -> None:
    """Takes a step and writes its record, which a checkpoint needs."""
    found = trainer.take_step(1.0)
    trainer.metrics.append(StepRecord(trainer.step, found.loss, found.grad_norm, 0.0, found.tokens, 0.0))


def own_share(trainer: Trainer) -> float:
    """The fraction of a step outside operations and collectives."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        begin = time.perf_counter()
        step(trainer)
        wall = time.perf_counter() - begin
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profiled.events() or ()
        if event.name.startswith(("aten::", "c10d::", "gloo:", "autograd::"))
    )
    busy, reached = 0.0, -1.0
    for start, end in spans:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return 1 - busy / 1e6 / wall


def held_bytes(trainer: Trainer) -> int:
    """Bytes of parameters, gradients and optimizer state on this rank."""
    parameters = [one for group in trainer.optimizer.param_groups for one in group["params"]]
    moments = [value for one in parameters for value in trainer.optimizer.state[one].values()]
    return 2 * sum(one.nbytes for one in parameters) + sum(value.nbytes for value in moments)


def measure(depth: str, ranks: Ranks, folder: Path) -> dict[str, Any]:
    """The numbers of one depth mixer."""
    trainer = Trainer(recipe(depth, ranks.count), RunFolder(folder), Progress(), ranks)
    step(trainer)
    shares = [own_share(trainer) for _ in range(STEPS)]
    held = held_bytes(trainer)
    reset_peak()
    before = peak_now()
    trainer.save()
    saving = peak_now() - before
    del trainer
    reset_peak()
    before = peak_now()
    trainer = Trainer(recipe(depth, ranks.count), RunFolder(folder), Progress(), ranks)
    return {
        "depth": depth,
        "own share of a step": statistics.median(shares),
        "MiB of parameters, gradients, optimizer": held / 2**20,
        "MiB more while saving": saving,
        "MiB more while building and restoring": peak_now() - before,
    }


def main() -> None:
    """Measures, and prints JSON on the first rank."""
    torch.set_num_threads(1)
    count = int(os.environ.get("WORLD_SIZE", "1"))
    name = Path(tempfile.gettempdir()) / f"twoaxis-scale-{os.environ.get('MASTER_PORT', '0')}"
    with joined(recipe("residual", count).parallel, "cpu") as ranks:
        for depth in sys.argv[1:] or ["residual", "attention_residuals", "mhc"]:
            found = measure(depth, ranks, name / depth)
            if ranks.is_first:
                print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
