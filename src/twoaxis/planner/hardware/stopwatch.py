"""Seconds of a computation: warmed up, repeated, the median taken, and all of it within a limit."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from twoaxis.core.errors import ConfigError, problem

WARMUP_RUNS = 2
FEWEST_RUNS, MOST_RUNS = 3, 500

Run = Callable[[], object]
Clock = Callable[[], float]


@dataclass(frozen=True)
class Sample:
    """Runs of one computation.

    Attributes:
        seconds: the median of one run.
        spread: the upper quartile over the lower; a quiet machine stays below 1.1.
        runs: how many there were, warm-up not counted.
    """

    seconds: float
    spread: float = 1.0
    runs: int = 1


class Stopwatch:
    """Measures computations until its time is up.

    Args:
        limit_seconds: for all of them together.
        clock: what tells the time in seconds.
        wait: what waits until the device has done all that was asked of it.

    Raises:
        ConfigError: a limit that is no positive number.
    """

    def __init__(self, limit_seconds: float, clock: Clock = time.perf_counter, wait: Run = lambda: None) -> None:
        if not 0 < limit_seconds < float("inf"):
            raise ConfigError(problem("seconds", limit_seconds, "a positive number of seconds", "give it 20"))
        self._clock, self._wait = clock, wait
        self._end = clock() + limit_seconds

    @property
    def left_seconds(self) -> float:
        """What is left of the limit, never below 0."""
        return max(0.0, self._end - self._clock())

    def measure(self, run: Run, share_seconds: float) -> Sample:
        """Runs a computation until its share of the time is over, but no fewer than three times.

        Args:
            run: the computation.
            share_seconds: the time for it, warm-up included.
        """
        begin = self._clock()
        for _ in range(WARMUP_RUNS):
            self._once(run)
        found: list[float] = []
        while len(found) < FEWEST_RUNS or (len(found) < MOST_RUNS and self._clock() - begin < share_seconds):
            found.append(self._once(run))
        low, middle, high = statistics.quantiles(found, n=4)
        return Sample(middle, high / low if low > 0 else 1.0, len(found))

    def _once(self, run: Run) -> float:
        begin = self._clock()
        run()
        self._wait()
        return self._clock() - begin
