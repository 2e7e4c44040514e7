"""Timing by interleaved rounds and peak memory by fresh processes, with what else the machine was doing.

A host drifts by more than the differences of interest, so nothing here is comparable across runs: every round
runs all candidates once, and a candidate is reported as the median of its per-round ratios to the first one.
"""

import functools
import math
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch

QUIET_CORES = 0.15
"""A sample counts as quiet while other processes use fewer cores than this."""


@dataclass(frozen=True)
class Sample:
    """Runs of one candidate: the wall time and own CPU time of one run, and the cores that others kept busy.

    `other_cores` is None where the system does not say.
    """

    seconds: float
    cpu_seconds: float
    other_cores: float | None

    @property
    def quiet(self) -> bool:
        """Whether the machine did little else meanwhile."""
        return self.other_cores is not None and self.other_cores < QUIET_CORES


@dataclass(frozen=True)
class Timing:
    """What the rounds say about one candidate.

    Attributes:
        seconds: median wall time of one run.
        first_seconds: that of the first candidate in the same rounds.
        ratio: median over rounds of its time over the first candidate's time in the same round.
        lowest: the smallest of these ratios.
        highest: the largest of these ratios.
        cpu_ratio: the same median for CPU time, which contention disturbs less.
        other_cores: the largest load by other processes in any round used, or None.
        rounds: the rounds used.
        quiet: whether all of them were quiet.
    """

    name: str
    seconds: float
    first_seconds: float
    ratio: float
    lowest: float
    highest: float
    cpu_ratio: float
    other_cores: float | None
    rounds: int
    quiet: bool


def interleave(
    candidates: Mapping[str, Callable[[], object]], rounds: int = 7, warmup: int = 2, sample_seconds: float = 0.25
) -> list[Timing]:
    """Runs A B C, A B C, ... and reports every candidate relative to the first.

    Rounds in which a candidate or the first one was disturbed are left out when at least three others remain.

    Args:
        candidates: what to run, by name; the first one is the baseline.
        rounds: samples of each candidate.
        warmup: runs of each candidate before the first sample, at least 1.
        sample_seconds: a candidate that is faster than this runs several times in one sample, since the
            system counts the load by other processes in steps of 10 ms.
    """
    repeats: dict[str, int] = {}
    for name, candidate in candidates.items():
        for _ in range(warmup):
            once = _sample(candidate, 1).seconds
            repeats[name] = max(1, math.ceil(sample_seconds / once))
    samples: dict[str, list[Sample]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, candidate in candidates.items():
            samples[name].append(_sample(candidate, repeats[name]))
    first = next(iter(samples.values()))
    return [_timing(name, own, first) for name, own in samples.items()]


def _timing(name: str, own: Sequence[Sample], first: Sequence[Sample]) -> Timing:
    pairs = list(zip(own, first, strict=True))
    quiet = [(a, b) for a, b in pairs if a.quiet and b.quiet]
    used = quiet if len(quiet) >= 3 else pairs
    ratios = [a.seconds / b.seconds for a, b in used]
    loads = [sample.other_cores for pair in used for sample in pair if sample.other_cores is not None]
    return Timing(
        name=name,
        seconds=statistics.median(a.seconds for a, _ in used),
        first_seconds=statistics.median(b.seconds for _, b in used),
        ratio=statistics.median(ratios),
        lowest=min(ratios),
        highest=max(ratios),
        cpu_ratio=statistics.median(a.cpu_seconds / max(b.cpu_seconds, 1e-9) for a, b in used),
        other_cores=max(loads, default=None),
        rounds=len(used),
        quiet=len(quiet) >= 3,
    )


@functools.cache
def bytes_per_second() -> float:
    """How fast memory larger than the caches is copied, each byte read and written."""
    source, target = (torch.zeros(2**26) for _ in range(2))
    (timing,) = interleave({"copy": lambda: target.copy_(source)}, rounds=3)
    return 2 * source.nbytes / timing.seconds


def _sample(candidate: Callable[[], object], repeats: int) -> Sample:
    busy, own, begin = _busy_seconds(), _own_cpu_seconds(), time.perf_counter()
    for _ in range(repeats):
        candidate()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    cpu_seconds = _own_cpu_seconds() - own
    busy_after = _busy_seconds()
    other_cores = None
    if busy is not None and busy_after is not None:
        other_cores = max(0.0, busy_after - busy - cpu_seconds) / seconds
    return Sample(seconds / repeats, cpu_seconds / repeats, other_cores)


def _own_cpu_seconds() -> float:
    return time.process_time() + os.times().children_user + os.times().children_system


def _busy_seconds() -> float | None:
    """CPU seconds that all processes together have used since boot, virtual machines' stolen time included."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return None
    user, nice, system, _, _, irq, softirq, steal = (int(ticks) for ticks in stat.read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Memory:
    """Resident bytes of a fresh process: before the first step, and the highest value during the steps."""

    before_bytes: int
    peak_bytes: int

    @property
    def step_bytes(self) -> int:
        """What the steps needed beyond the interpreter, the libraries and the built model."""
        return self.peak_bytes - self.before_bytes


def peak_memory(build: Callable[[], Callable[[], object]], steps: int = 2) -> Memory:
    """Builds a step in a fresh process, runs it a few times there, and returns the memory this took.

    Args:
        build: a function of a module, or a `functools.partial` of one, that returns the step.
        steps: how often to run it.

    Raises:
        RuntimeError: the process failed; its own trace is on stderr.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measure_memory, args=(sender, build, steps))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"the process that measures memory exited with code {process.exitcode}") from None
    finally:
        process.join()


def _measure_memory(sender: Connection, build: Callable[[], Callable[[], object]], steps: int) -> None:
    step = build()
    before = _status_bytes("VmRSS")
    # Forgets the peak of building, so that only the steps count.
    Path("/proc/self/clear_refs").write_text("5")
    for _ in range(steps):
        step()
    sender.send(Memory(before, _status_bytes("VmHWM")))


def _status_bytes(field: str) -> int:
    # Not getrusage: the peak it reports for a child includes what its parent had at the fork.
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}: peak memory needs Linux")


def header() -> dict[str, str]:
    """What a reader needs to judge the numbers: machine, versions, threads, and the allocator."""
    allocator = {name: value for name, value in os.environ.items() if name.startswith(("MALLOC_", "LD_PRELOAD"))}
    openmp = {name: value for name, value in os.environ.items() if name.startswith(("OMP_", "MKL_", "KMP_"))}
    return {
        "machine": f"{_processor()}, {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}",
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": f"{torch.get_num_threads()} (interop {torch.get_num_interop_threads()})",
        "openmp": _assignments(openmp) or "defaults",
        "allocator": f"{' '.join(platform.libc_ver())} {_assignments(allocator) or 'defaults'}",
    }


def header_lines() -> str:
    """The header as a Markdown list."""
    return "".join(f"* {key}: {value}\n" for key, value in header().items())


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _assignments(values: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in sorted(values.items()))


def table(timings: Sequence[Timing], units: float | None = None) -> str:
    """Lays the timings out as a Markdown table.

    Args:
        timings: the result of `interleave`.
        units: how many units of work one run does, such as tokens; adds a column of units per second.
    """
    lines = ["| candidate | ms | ratio (min..max) | CPU ratio | other cores | rounds |", "|---|---|---|---|---|---|"]
    if units is not None:
        lines = [lines[0] + " per second |", lines[1] + "---|"]
    for t in timings:
        load = "unknown" if t.other_cores is None else f"{t.other_cores:.2f}"
        row = f"| {t.name} | {t.seconds * 1e3:.1f} | **{t.ratio:.2f}** ({t.lowest:.2f}..{t.highest:.2f}) | {t.cpu_ratio:.2f} "
        row += f"| {load} | {t.rounds}{'' if t.quiet else ' disturbed'} |"
        lines.append(row if units is None else f"{row} {units / t.seconds:.0f} |")
    return "\n".join(lines)
