"""The operations that a calibration times, and the rates that are fitted to them.

Letters: m, k, n the sides of a matrix product; h its half size; R rates.
"""

import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from twoaxis.core.errors import ConfigError, problem
from twoaxis.model import Decoder, DecoderConfig
from twoaxis.planner.formulas.roofline import Data, harmonic_size, memory_seconds, operator
from twoaxis.planner.hardware.counted import FUNCTION_FLOPS, eager_operators

WARMUP_RUNS = 2
FEWEST_RUNS, MOST_RUNS = 3, 500

Run = Callable[[], object]
Clock = Callable[[], float]


@dataclass(frozen=True)
class Sample:
    """Runs of one computation.

    Attributes:
        seconds: the median of one run.
        spread: the upper quartile over the lower; below 1.1 on an idle machine.
        runs: number of runs without warm-up.
    """

    seconds: float
    spread: float = 1.0
    runs: int = 1


class Stopwatch:
    """Times computations within a limit.

    Args:
        limit_seconds: for all of them together.
        clock: returns the time in seconds.
        wait: returns when the device is idle.

    Raises:
        ConfigError: a limit that is not positive and finite.
    """

    def __init__(self, limit_seconds: float, clock: Clock = time.perf_counter, wait: Run = lambda: None) -> None:
        if not 0 < limit_seconds < float("inf"):
            raise ConfigError(problem("seconds", limit_seconds, "a positive number of seconds", "give it 20"))
        self._clock, self._wait = clock, wait
        self._end = clock() + limit_seconds

    @property
    def left_seconds(self) -> float:
        """Seconds that are left of the limit, at least 0."""
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


PRODUCTS = (
    (64, 64, 64),
    (128, 128, 128),
    (256, 256, 256),
    (512, 512, 512),
    (1024, 1024, 1024),
    (2048, 256, 688),
    (2048, 688, 256),
)
"""[m, k] x [k, n] on a CPU; each side is eight times as long on a GPU, which needs larger ones to be busy."""

COPIES_BYTES = (2**18, 2**20, 2**21, 2**22, 2**23, 2**24, 2**25, 2**26, 2**27, 2**28)
"""Read and written by a copy on a CPU; eight times as much on a GPU."""

GPU_SCALE = 8

ELEMENTWISE_ROWS, COLUMNS = (512, 8192), 256
"""[rows, columns] of tensors in elementwise operations; eight times the rows on a GPU."""

LAUNCHES, FUNCTION_NUMBERS = 200, 2**17

SMALL = DecoderConfig(vocab_size=16, d_model=16, n_layers=4, max_seq_len=16)

MOST_CACHES, LEVEL_ERROR = 2, 0.05
"""The largest number of caches that is fitted, and the root mean square of log errors at which no more are tried."""


@dataclass(frozen=True)
class Work:
    """A computation to time.

    Attributes:
        name: with its shape.
        operators: of the computation.
        prepare: makes its tensors and returns the function to run.
    """

    name: str
    operators: tuple[Data, ...]
    prepare: Callable[[], Run]


def products(device: torch.device, dtype: torch.dtype) -> list[Work]:
    """Matrix products from small to large, square and thin."""
    scale = GPU_SCALE if device.type == "cuda" else 1
    return [_product(scale * m, scale * k, scale * n, device, dtype) for m, k, n in PRODUCTS]


def _product(m: int, k: int, n: int, device: torch.device, dtype: torch.dtype) -> Work:
    def prepare() -> Run:
        a, b = torch.randn(m, k, device=device, dtype=dtype), torch.randn(k, n, device=device, dtype=dtype)
        out = torch.empty(m, n, device=device, dtype=dtype)
        return lambda: torch.mm(a, b, out=out)

    moved = (m * k + k * n + m * n) * dtype.itemsize
    op = operator(2.0 * m * k * n, harmonic_size(m, k, n), 0.0, float(moved), 1.0)
    return Work(f"{dtype} product [{m}, {k}] x [{k}, {n}]".removeprefix("torch."), (op,), prepare)


def copies(device: torch.device) -> list[Work]:
    """Copies of tensors that fit into caches and of larger ones."""
    scale = GPU_SCALE if device.type == "cuda" else 1
    return [_copy(scale * moved, device) for moved in COPIES_BYTES]


def _copy(moved: int, device: torch.device) -> Work:
    def prepare() -> Run:
        source = torch.randn(moved // 8, device=device)
        # Written once before timing, so that its pages are allocated.
        target = torch.zeros_like(source)
        return lambda: target.copy_(source)

    return Work(f"copy, {moved / 2**20:g} MiB read and written", (operator(0.0, 0.0, 0.0, float(moved), 1.0),), prepare)


def launches(device: torch.device) -> Work:
    """Operations on a single number, one after the other, with a new tensor for each result."""

    def prepare() -> Run:
        one = torch.ones(1, device=device)

        def run() -> None:
            for _ in range(LAUNCHES):
                torch.add(one, one)

        return run

    return Work(f"{LAUNCHES} operations on one number", (operator(0.0, 0.0, 0.0, 0.0, 1.0),) * LAUNCHES, prepare)


def elementwise(device: torch.device) -> list[Work]:
    """Elementwise operations of models on tensors that fit into caches and on larger ones."""
    scale = GPU_SCALE if device.type == "cuda" else 1
    return [work for rows in ELEMENTWISE_ROWS for work in _elementwise(scale * rows, device)]


def _elementwise(rows: int, device: torch.device) -> Iterator[Work]:
    shape = f"[{rows}, {COLUMNS}]"
    whole, column = 4.0 * rows * COLUMNS, 4.0 * rows

    def tensors() -> tuple[Tensor, Tensor, Tensor]:
        a, b = (torch.randn(rows, COLUMNS, device=device) for _ in range(2))
        return a, b, torch.rand(rows, 1, device=device)

    def of(run: Callable[[Tensor, Tensor, Tensor], object]) -> Callable[[], Run]:
        return lambda: functools.partial(run, *tensors())

    for name, moved, prepare in (
        (f"sum of two {shape}", 3 * whole, of(lambda a, b, c: a + b)),
        (f"{shape} times a column", 2 * whole + column, of(lambda a, b, c: a * c)),
        (
            f"{shape} plus a column times {shape}, in place",
            3 * whole + column,
            of(lambda a, b, c: a.addcmul_(b, c, value=1e-9)),
        ),
        (f"sums of the rows of {shape}", whole + column, of(lambda a, b, c: a.sum(-1))),
    ):
        yield Work(name, (operator(0.0, 0.0, 0.0, moved, 1.0),), prepare)


def small_model(device: torch.device, dtype: torch.dtype) -> Work:
    """A decoder so small that all of its time is overhead of its operations."""

    def prepare() -> Run:
        model = Decoder.build(SMALL, seed=0).to(device=device, dtype=dtype)
        token = torch.zeros(1, 1, dtype=torch.long, device=device)

        def run() -> None:
            with torch.inference_mode():
                model(token)

        return run

    return Work("one token of a decoder of width 16, 4 layers", tuple(eager_operators(prepare())), prepare)


def functions(device: torch.device) -> Work:
    """SiLU of a tensor that fits into a cache."""
    count = FUNCTION_NUMBERS * (GPU_SCALE if device.type == "cuda" else 1)

    def prepare() -> Run:
        x, out = torch.randn(count, device=device), torch.empty(count, device=device)
        return lambda: torch.ops.aten.silu.out(x, out=out)

    return Work(f"SiLU of {count} numbers", (operator(0.0, 0.0, count * FUNCTION_FLOPS, 8.0 * count, 1.0),), prepare)


def fit_products(work: Sequence[Data], seconds: Sequence[float], launch: float) -> tuple[float, float]:
    """Fits (R, h) to the seconds of matrix products, by relative error.

    Equation: t - launch = FLOPs (1/R + (h/R) / s), linear in 1/R and h/R; h = 0 where the fit would make it negative
    """
    per_flop = numpy.array([max(t - launch, 1e-12) / op["matmul_flops"] for op, t in zip(work, seconds, strict=True)])
    surface = numpy.array([1.0 / op["size"] for op in work])
    columns = numpy.stack([numpy.ones_like(surface), surface], axis=1) / per_flop[:, None]
    inverse_rate, slope = numpy.linalg.lstsq(columns, numpy.ones_like(surface), rcond=None)[0]
    if slope < 0 or inverse_rate <= 0:
        return float(1.0 / numpy.median(per_flop)), 0.0
    return float(1.0 / inverse_rate), float(slope / inverse_rate)


def fit_memory(moved: Sequence[float], seconds: Sequence[float], launch: float) -> tuple[list[tuple[float, float]], float]:
    """Fits ([bytes, rate] of each cache from small to large, rate of the memory) to the seconds of copies.

    The sizes are divided into the fewest levels of one rate each with an error below `LEVEL_ERROR`, each slower than the one
    before; the size of a cache is the largest of its level.
    """
    pairs = sorted((b, b / max(t - launch, 1e-12)) for b, t in zip(moved, seconds, strict=True))
    found: list[tuple[float, list[tuple[float, float]]]] = []
    for caches in range(MOST_CACHES + 1):
        for cuts in itertools.combinations(range(1, len(pairs)), caches):
            levels = [pairs[a:b] for a, b in itertools.pairwise((0, *cuts, len(pairs)))]
            rates = [statistics.geometric_mean(rate for _, rate in level) for level in levels]
            if all(fast > slow for fast, slow in itertools.pairwise(rates)):
                squares = [math.log(own / rate) ** 2 for level, rate in zip(levels, rates, strict=True) for _, own in level]
                sizes = [level[-1][0] for level in levels]
                found.append((math.sqrt(statistics.fmean(squares)), list(zip(sizes, rates, strict=True))))
        if min(found)[0] < LEVEL_ERROR:
            break
    *cached, (_, memory_rate) = min(found)[1]
    return cached, memory_rate


def fit_efficiency(work: Sequence[Data], seconds: Sequence[float], rates: Data) -> float:
    """The fraction of the rate of copies that other operations reach: the geometric mean, at most 1."""
    fractions = [
        memory_seconds(op["bytes"], rates) / max(t - rates["launch_seconds"], 1e-12)
        for op, t in zip(work, seconds, strict=True)
    ]
    return min(1.0, statistics.geometric_mean(fractions))
