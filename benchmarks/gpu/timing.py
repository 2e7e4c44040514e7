"""Candidates in turns on one device: time as ratios to the first, and the device memory that one run needs."""

from collections.abc import Callable, Mapping

import torch

from benchmarks.gpu.settings import Row, Settings
from benchmarks.gpu.worker import one_line
from benchmarks.measure import Timing, interleave

MIB = 2**20

Candidate = Callable[[], object]


def timed(candidates: Mapping[str, Candidate], settings: Settings, warmup: int = 2) -> list[Timing]:
    """Rounds in which each has its turn; every sample ends when the device is done.

    Args:
        candidates: the first is what the others are compared with.
        settings: of the check.
        warmup: runs of each before the first sample.
    """
    rounds, seconds = settings.pick((7, 0.03), (2, 0.0))
    return interleave(candidates, rounds=rounds, warmup=warmup, sample_seconds=seconds)


def compared(item: str, candidates: Mapping[str, Candidate], settings: Settings, moved_bytes: float | None = None) -> list[Row]:
    """A row per candidate; one that fails has its error in place of numbers, unless it is the first.

    Args:
        item: what is computed, with its shape.
        candidates: by name, as of `timed`.
        settings: of the check.
        moved_bytes: what has to be read and written at the least, for a column of rates.
    """
    able: dict[str, Candidate] = {}
    failed: list[Row] = []
    for name, candidate in candidates.items():
        try:
            candidate()
            able[name] = candidate
        except Exception as failure:
            if not able:
                raise
            failed.append({"what": item, "candidate": name, "ok": False, "error": one_line(failure)})
    rows = []
    for t in timed(able, settings):
        rows.append({"what": item, "candidate": t.name, "ms": 1e3 * t.seconds, **ratios(t)})
        if moved_bytes is not None:
            rows[-1]["GB/s of the least"] = moved_bytes / t.seconds / 1e9
        rows[-1]["peak MiB"] = peak_mib(able[t.name], settings)
    return rows + failed


def ratios(timing: Timing) -> Row:
    """The median ratio to the first candidate, and the smallest and largest of the rounds."""
    return {"ratio": timing.ratio, "min..max": f"{timing.lowest:.2f}..{timing.highest:.2f}"}


def peak_mib(run: Candidate, settings: Settings) -> float | None:
    """The most that one run holds on the device beyond what was there before; None without device memory to ask for."""
    if not settings.on_gpu:
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / MIB
