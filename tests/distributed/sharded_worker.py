"""One process of the runs that test_sharded.py compares."""

import errno
import json
import os
import shutil
import socket
import time
from collections import Counter
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from twoaxis.core.errors import TwoAxisError
from twoaxis.study import timing
from twoaxis.train import TrainConfig, read_metrics, train
from twoaxis.train.parallel import sharded_checkpoint
from twoaxis.train.parallel.ranks import joined
from twoaxis.train.step import StepOutcome
from twoaxis.train.trainer import Trainer

WORDS = [
    "depth",
    "axis",
    "stream",
    "block",
    "layer",
    "source",
    "weight",
    "read",
    "write",
    "gate",
    "norm",
    "query",
    "key",
    "value",
    "state",
    "token",
]


THREE_BLOCKS = {"d_model": 24, "n_layers": 3, "depth": "mhc"}


BEGINNING, STEPS, LONGER = 1, 2, 4
"""Of a run that is stopped or goes on elsewhere, of one with a checkpoint in its middle and one at its end, and of one that
goes on from that; the first validation after another update would show moments that were lost."""

NEWEST = f"step-{STEPS:08}"
"""The checkpoint at the end."""


def recipe(folder: Path, **changes: Any) -> TrainConfig:
    """Small, with a group that is frozen, one that is annealed, micro-batches and isolated documents."""
    corpus = folder / "corpus.txt"
    if not corpus.exists():
        corpus.write_text(" ".join(WORDS[n * n % 16] for n in range(3000)))
    data = {
        "model": {"d_model": 24, "n_layers": 2, "depth": "mhc"},
        "data": {"corpus": str(corpus), "seq_len": 32},
        "optimizer": {"groups": [{"pattern": "embedding.weight", "lr_scale": 0}], "clip_norm": 0.5},
        "anneal": [{"pattern": "norm.gain", "start": 1.0, "stop": 0.5, "steps": STEPS}],
        "schedule": "constant",
        "batch_size": 12,
        "micro_batch_size": 4,
        "steps": STEPS,
        "validate_every": BEGINNING,
        # Nine windows, which no number of ranks but three divides.
        "validation_tokens": 300,
        "checkpoint_every": BEGINNING,
        "device": "cpu",
        **changes,
    }
    return TrainConfig.from_data(data)


EARLIER_TOKENS: dict[str, Any] = {"d_model": 24, "n_layers": 2, "depth": {"kind": "deep_delta", "preset": "ddl_tc"}}
"""Reads of the depth state look at three earlier tokens."""

TIMED: dict[str, dict[str, Any]] = {"plain": {"model": {"d_model": 24, "n_layers": 2}}, "mhc": {}}
"""Arms of a study by their changes."""

TIMED_ROUNDS = 2
"""What is compared does not depend on them, unlike errors of times."""

FEW_HEADS: dict[str, Any] = {
    "d_model": 24,
    "n_layers": 2,
    "depth": {"kind": "value_residual", "variant": "gated"},
    "blocks": [[{"kind": "attention", "n_heads": 4, "n_kv_heads": 1}, {"kind": "swiglu", "d_ff": 34}]],
}
"""One kv-head, which all tensor ranks hold, and rows that shards cut inside of a gate."""


MUON: dict[str, Any] = {
    "model": {
        "d_model": 24,
        "n_layers": 2,
        "depth": "mhc",
        "blocks": [[{"kind": "attention", "n_heads": 4, "head_dim": 6}, "swiglu"]],
        "parametrization": "completep",
        "base_d_model": 12,
        "base_n_layers": 1,
    },
    "optimizer": {"kind": "muon", "groups": [{"pattern": "*.gain", "lr_scale": 0.5}]},
}
"""The recipe of 2026."""

ONE_KV_HEAD = [[{"kind": "attention", "n_heads": 4, "n_kv_heads": 1, "head_dim": 6}, {"kind": "swiglu", "d_ff": 34}]]
MUON_FEW_HEADS = {**MUON, "model": {**MUON["model"], "blocks": ONE_KV_HEAD}}


def losses(folder: Path) -> list[list[float | None]]:
    """What the metrics of a run hold, without times."""
    return [
        [record.loss, record.grad_norm, record.tokens, record.validation_loss]
        for record in read_metrics(folder / "metrics.jsonl")
    ]


class CollectiveBytes(TorchDispatchMode):
    """Bytes that this rank sends in a ring of `ranks`, by collective."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks, self.sent = ranks, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            # The first argument is what comes out: the whole of a gather, the shard of a reduction.
            out = args[0] if isinstance(args[0], torch.Tensor) else args[0][0]
            shard = {"_allgather_base_": out.nbytes // self.ranks, "_reduce_scatter_base_": out.nbytes}
            name = func.overloadpacket.__name__
            self.sent[name] += shard.get(name, 2 * out.nbytes // self.ranks) * (self.ranks - 1)
        return func(*args, **(kwargs or {}))


class Worker:
    """One of several processes: runs scenarios that need it, and keeps what they came to."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank, self.found = folder, rank, dict[str, Any]()
        self._runs = Counter[str]()

    def run(self, name: str, should_stop: Callable[[], bool] | None = None, **changes: Any) -> str:
        """Trains, or says why not."""
        config = recipe(self.folder, **{"parallel": {"shard": 2}, **changes})
        config = config.replace(parallel=config.parallel.replace(timeout_seconds=60.0))
        self._meet(name, config.parallel.ranks)
        try:
            return train(config, self.folder / name, should_stop=should_stop).status
        except TwoAxisError as error:
            return f"{type(error).__name__}: {error}"

    @property
    def stop(self) -> Callable[[], bool] | None:
        """Stops a run after its first steps, by the second rank alone."""
        taken = count(1)
        return (lambda: next(taken) >= BEGINNING) if self.rank == 1 else None

    def _meet(self, name: str, ranks: int) -> None:
        """A port of this machine that the ranks of a run share."""
        path = self.folder / f".port-{name}-{self._runs[name]}"
        self._runs[name] += 1
        if self.rank == 0:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                path.with_suffix(".draft").write_text(str(free.getsockname()[1]))
            path.with_suffix(".draft").rename(path)
        while not path.exists():
            time.sleep(0.01)
        os.environ |= {"MASTER_PORT": path.read_text(), "WORLD_SIZE": str(ranks)}

    def straight(self) -> None:
        """From the beginning to the end; then once more, which reads the result."""
        self.found["straight"] = self.run("straight")
        self.found["again"] = self.run("straight")

    def stopped(self) -> None:
        """Stopped by the second rank alone before a checkpoint is due, and continued."""
        late: dict[str, Any] = {"checkpoint_every": STEPS}
        self.found["stopped"] = [self.run("stopped", self.stop, **late), self.run("stopped", **late)]

    def replicated(self) -> None:
        """Two copies of the whole model."""
        self.found["replicated"] = self.run("replicated", parallel={"replicate": 2})

    def replicated_shards(self) -> None:
        """Two copies, each of two ranks that share out their parameters and rows."""
        self.found["replicated shards"] = self.run(
            "replicated_shards", parallel={"replicate": 2, "shard": 2}, micro_batch_size=3
        )

    def half_precision(self) -> None:
        """Under autocast, sharded and in two stages."""
        self.found["bfloat16"] = [
            self.run("bfloat16", precision="bfloat16"),
            self.run("stages_bfloat16", precision="bfloat16", parallel={"pipeline": 2}),
        ]

    def background(self) -> None:
        """Checkpoints written while training goes on; then continued."""
        background = {"shard": 2, "saving": "background"}
        self.found["background"] = [self.run("background", parallel=background, steps=n) for n in (BEGINNING, STEPS)]

    def other_recipe(self) -> None:
        """Another seed on the last rank."""
        self.found["other recipe"] = self.run("other", seed=self.rank)

    def full_disk(self) -> None:
        """No space for the first rank at the second checkpoint; then there is."""
        finish = sharded_checkpoint.finish_checkpoint

        def fails(draft: Path, path: Path, state: Any) -> None:
            if path.name == NEWEST:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            finish(draft, path, state)

        sharded_checkpoint.finish_checkpoint = fails
        said = self.run("full")
        sharded_checkpoint.finish_checkpoint = finish
        left = sorted(path.name for path in (self.folder / "full" / "checkpoints").iterdir())
        self.found["full disk"] = [said, left, self.run("full")]

    def missing_shard(self) -> None:
        """The newest checkpoint of the first run without the file of a rank."""
        self.copy("straight", "missing")
        if self.rank == 0:
            next((self.folder / "missing/checkpoints" / NEWEST).glob("shard-00002-*")).unlink()
            (self.folder / "missing/result.json").unlink()
        self.found["missing shard"] = self.run("missing")

    def counted(self) -> None:
        """What the ranks send each other in every step."""
        steps, take_step = list[dict[str, int]](), Trainer.take_step

        def watched(self: Trainer, multiplier: float) -> StepOutcome:
            with CollectiveBytes(self.ranks.count) as counted:
                outcome = take_step(self, multiplier)
            steps.append(dict(counted.sent))
            return outcome

        Trainer.take_step = watched
        self.run("counted", steps=2, micro_batch_size=2)
        Trainer.take_step = take_step
        self.found["counted"] = steps

    def timed(self) -> None:
        """The seconds and memory of two arms of a study, measured by both ranks together."""
        arms = {name: recipe(self.folder, parallel={"shard": 2}, **changes) for name, changes in TIMED.items()}
        self._meet("timed", 2)
        timing.ROUNDS = TIMED_ROUNDS
        with joined(arms["plain"].parallel, "cpu") as ranks:
            found = timing.measure(arms, ranks)
        self.found["timed"] = [found.state_bytes, found.saved_bytes, sorted(found.seconds), found.rounds]

    def pipelined(self) -> None:
        """Two stages; then the sharded run continued by two stages."""
        self.found["pipelined"] = self.run("pipelined", parallel={"pipeline": 2})
        self.copy("straight", "cut")
        self.found["cut"] = self.run("cut", steps=LONGER, parallel={"pipeline": 2, "schedule": "gpipe"})

    def two_by_two(self) -> None:
        """Two stages, each of two ranks that share out their parameters and rows."""
        self.found["two by two"] = self.run("two_by_two", parallel={"pipeline": 2, "shard": 2}, micro_batch_size=2)

    def three_stages(self) -> None:
        """One block on each of three ranks; the middle one holds neither end."""
        self.found["three stages"] = self.run("three_stages", parallel={"pipeline": 3}, model=THREE_BLOCKS)

    def other_windows(self) -> None:
        """The run of one process, from before these processes, continued by two with other micro-batches."""
        self.found["other windows"] = self.run("other_windows", micro_batch_size=3, recompute="block")

    def on_three(self) -> None:
        """The sharded run continued on three ranks."""
        self.copy("straight", "on_three")
        self.found["on three"] = self.run("on_three", steps=LONGER, parallel={"shard": 3})

    def tensor(self) -> None:
        """Two tensor ranks with whole streams; then the sharded run continued by two with sharded streams."""
        self.found["tensor"] = self.run("tensor", parallel={"tensor": 2, "saving": "background"})
        self.copy("straight", "divided")
        streams = {"tensor": 2, "sequence": "tensor"}
        self.found["divided"] = self.run("divided", steps=LONGER, parallel=streams)

    def stopped_tensor(self) -> None:
        """Sharded streams, stopped and continued."""
        given = {"parallel": {"tensor": 2, "sequence": "tensor"}, "model": EARLIER_TOKENS}
        said = [self.run("tensor_whole", **given), self.run("tensor_stopped", self.stop, **given)]
        self.found["stopped tensor"] = [*said, self.run("tensor_stopped", **given)]

    def tensor_and_shard(self) -> None:
        """Two by two: shards of the parts of two tensor ranks with sharded streams."""
        layout = {"tensor": 2, "shard": 2, "sequence": "tensor"}
        self.found["tensor and shard"] = self.run("tensor_and_shard", parallel=layout, model=FEW_HEADS, recompute="block")

    def muon(self) -> None:
        """Matrices that ranks gather in turns: stopped and continued, on two stages, and as parts of tensor ranks."""
        said = [self.run("muon", **MUON), self.run("muon_stopped", self.stop, **MUON), self.run("muon_stopped", **MUON)]
        self.found["muon"] = [*said, self.run("muon_stages", parallel={"pipeline": 2}, **MUON)]

    def muon_on_four(self) -> None:
        """Rows of the heads and hidden numbers of two tensor ranks each, and one kv-head, which both hold."""
        self.found["muon on four"] = self.run("muon_on_four", parallel={"tensor": 2, "shard": 2}, **MUON_FEW_HEADS)

    def copy(self, name: str, other: str) -> None:
        """Copies a run, by the first rank."""
        if self.rank == 0:
            shutil.copytree(self.folder / name, self.folder / other)


def main(folder: Path, rank: int, ranks: int) -> None:
    """Runs every scenario in order."""
    del ranks
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "TWOAXIS_CACHE": str(folder / "cache")}
    worker = Worker(folder, rank)
    scenarios = {
        worker.straight: 2,
        worker.stopped: 2,
        worker.replicated: 2,
        worker.half_precision: 2,
        worker.background: 2,
        worker.other_recipe: 2,
        worker.full_disk: 2,
        worker.missing_shard: 2,
        worker.counted: 2,
        worker.timed: 2,
        worker.pipelined: 2,
        worker.other_windows: 2,
        worker.three_stages: 3,
        worker.on_three: 3,
        worker.two_by_two: 4,
        worker.replicated_shards: 4,
        worker.tensor: 2,
        worker.stopped_tensor: 2,
        worker.tensor_and_shard: 4,
        worker.muon: 2,
        worker.muon_on_four: 4,
    }
    for scenario, ranks in scenarios.items():
        if rank < ranks:
            scenario()
    (folder / f"found-{rank}.json").write_text(json.dumps(worker.found))
