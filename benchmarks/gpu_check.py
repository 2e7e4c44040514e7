"""`python benchmarks/gpu_check.py`: is this GPU right, and how fast is it? One command, one result file, at most 8 minutes.

Stages in the order of their value: correctness of every mixer, GPU kernels, tables of operators, training and decoding at
GPT-2's small shape, compiled steps, and a short study through the command line. The result file is written after every item,
so whoever is cut off keeps what is known; what no longer fits into the time is left out, and the file says so. It needs no
network.

Exit status: 0 when every check that was made holds, 1 when one does not or could not be made, 2 for bad arguments.
"""

import argparse
import os
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# Run as a script, Python looks for modules beside it only.
sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.gpu import study
from benchmarks.gpu.result import Result, markdown
from benchmarks.gpu.settings import Settings
from benchmarks.gpu.worker import ItemFailed, Worker

RESULTS = Path(__file__).parent / "results"

KEPT_SECONDS = 5.0
"""At the end, for ending what runs and writing what is known."""

FIRST_WORDS_SECONDS = 60.0
"""What importing, and the first words with a device, may take."""


@dataclass(frozen=True)
class Stage:
    """One table.

    Attributes:
        name: its title.
        module: that measures it.
        legend: how to read it.
        until: the part of the whole time after which it begins nothing new, so that later stages have their turn.
        item_seconds: what an item is taken to need before one has been measured.
        item_limit_seconds: after which one is ended.
    """

    name: str
    module: str
    legend: str
    until: float
    item_seconds: float = 5.0
    item_limit_seconds: float = 60.0


STAGES = (
    Stage("Environment", "benchmarks.gpu.environment", "Where this was measured.", 1.0),
    Stage(
        "Correctness",
        "benchmarks.gpu.correctness",
        "Float32 on the device against float64 on the CPU, over the examples of each mixer: largest errors relative to the "
        "largest entry, and what float32 on the CPU lets one expect. Also: autocast is finite, its statistics are float32.",
        0.30,
    ),
    Stage(
        "Kernels",
        "benchmarks.gpu.depth_kernels",
        "Triton's kernels against float64 on the device, then microseconds of one call in a captured graph, medians of 7 "
        "rounds, and the bytes that have to move over what a copy moves in this time.",
        0.48,
        item_seconds=8.0,
    ),
    Stage(
        "Write kernels",
        "benchmarks.gpu.write_kernels",
        "The same of delta writes, mixing of streams and Sinkhorn, beside what `torch.compile` makes of their plain forms.",
        0.53,
        item_seconds=8.0,
    ),
    Stage(
        "Operators",
        "benchmarks.gpu.kernels",
        "Forward and backward in turns, ratios to the first candidate of each shape, medians of 7 rounds.",
        0.58,
        item_seconds=8.0,
    ),
    Stage(
        "Training and decoding",
        "benchmarks.gpu.throughput",
        "Eager steps in bfloat16, forward and backward, and greedy decoding of one row, in turns with the residual alone.",
        0.72,
    ),
    Stage(
        "Compiled training",
        "benchmarks.gpu.compiled",
        "The same steps with compiled blocks; ratios to the eager residual, so divide two of them to compare mixers.",
        0.78,
        item_seconds=20.0,
        item_limit_seconds=150.0,
    ),
)

STUDY_SECONDS = 90.0
"""Below this the short study is not begun."""

STOP_SECONDS = 15.0
"""What a study that is asked to stop may need for it."""


class Clock:
    """The time that is left of a budget.

    Args:
        minutes: the budget.
    """

    def __init__(self, minutes: float) -> None:
        self.begin, self.total = time.monotonic(), 60 * minutes

    @property
    def used(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self.begin

    def left(self, part: float = 1.0) -> float:
        """Seconds until this part of the budget is spent, less what the end needs."""
        return min(part * self.total, self.total - KEPT_SECONDS) - self.used


def run_stage(stage: Stage, worker: Worker, clock: Clock, result: Result) -> None:
    """Measures one item after another while they fit into the time of the stage."""
    result.begin(stage.name, stage.legend)
    if clock.left(stage.until) < stage.item_seconds:
        result.leave_out([stage.name], _too_late(stage, clock))
        return
    try:
        names = worker.names(stage.module, min(FIRST_WORDS_SECONDS, clock.left()))
    except ItemFailed as failure:
        result.fail(stage.name, str(failure))
        return
    taken: list[float] = []
    for number, name in enumerate(names):
        expected = statistics.median(taken) if taken else stage.item_seconds
        if clock.left(stage.until) < expected:
            result.leave_out(names[number:], _too_late(stage, clock))
            return
        begin = clock.used
        try:
            result.add(worker.measure(stage.module, name, min(stage.item_limit_seconds, clock.left())))
        except ItemFailed as failure:
            result.fail(name, str(failure))
        taken.append(clock.used - begin)
        print(f"{clock.used:6.1f} s  {stage.name}: {name}", file=sys.stderr)


def _too_late(stage: Stage, clock: Clock) -> str:
    return f"{max(0.0, clock.left(stage.until)):.0f} s left for this table"


def run_study(settings: Settings, clock: Clock, result: Result, least_seconds: float) -> None:
    """Runs the short study if it still fits."""
    result.begin(
        "A short study",
        f"`twoaxis study studies/gpu/{study.STUDY.name}`, cut to two arms, two seeds and a few steps, shows that every part of "
        "a study works on this device. Its losses mean nothing.",
    )
    if clock.left() < least_seconds:
        result.leave_out([study.STUDY.name], f"{max(0.0, clock.left()):.0f} s left, and it may take {least_seconds:.0f} s")
        return
    with tempfile.TemporaryDirectory() as folder:
        try:
            result.add(study.run(settings, Path(folder) / "study", clock.left() - STOP_SECONDS))
        except ItemFailed as failure:
            result.fail(study.STUDY.name, str(failure))
    print(f"{clock.used:6.1f} s  short study", file=sys.stderr)


def check(settings: Settings, minutes: float, path: Path, stages: Sequence[Stage] = STAGES, studies: bool = True) -> Result:
    """Runs everything and returns the result, which is in the files as well.

    Args:
        settings: device and size.
        minutes: the whole time.
        path: of the result files, without a suffix.
        stages: to run, in order.
        studies: whether the short study comes after them.
    """
    clock = Clock(minutes)
    facts = {
        "device": settings.device,
        "size": settings.size,
        "time": f"{minutes:g} minutes",
        "began": time.strftime("%F %T %z"),
    }
    result = Result(path, f"GPU check: {path.stem.removeprefix('gpu-')}", facts)
    worker = Worker(settings)
    try:
        for stage in stages:
            run_stage(stage, worker, clock, result)
        # It holds device memory that the study needs.
        worker.stop()
        if studies:
            run_study(settings, clock, result, settings.pick(STUDY_SECONDS, 30.0))
    finally:
        worker.stop()
    result.finish(clock.used)
    return result


def device_name(device: str) -> str:
    """The name of the device in lower case, for a file.

    Raises:
        ConfigError: there is no such device here.
    """
    import torch

    from twoaxis.train.token_loss import choose_device

    chosen = choose_device(device)
    name = torch.cuda.get_device_name(chosen) if chosen.type == "cuda" else f"{os.cpu_count()}-core-{chosen.type}"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what the command line asks for."""
    from twoaxis.core.errors import ConfigError

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [stage.module.rpartition(".")[2] for stage in STAGES] + ["study"]
    parser.add_argument("stages", nargs="*", help=f"any of {', '.join(names)}; all by default")
    parser.add_argument("--device", default="cuda", help="of torch")
    parser.add_argument("--minutes", type=float, default=8.0, help="the whole time")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to try the check itself on any machine")
    parser.add_argument("--save", type=Path, help="result files, without a suffix; by default in benchmarks/results")
    given = parser.parse_args(arguments)
    if unknown := [name for name in given.stages if name not in names]:
        parser.error(f"unknown stage {unknown[0]!r}: must be one of {', '.join(names)}")
    try:
        name = device_name(given.device)
    except ConfigError as error:
        parser.error(str(error))
    settings = Settings(given.device, "small" if given.small else "full")
    path = given.save or RESULTS / f"gpu-{name}{'-small' if given.small else ''}"
    chosen = given.stages or names
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    stages = [stage for stage in STAGES if stage.module.rpartition(".")[2] in chosen]
    result = check(settings, given.minutes, path, stages, "study" in chosen)
    print(markdown(result.data))
    return 0 if result.ok else 1


if __name__ == "__main__":
    sys.exit(main())
