"""Measures the rates of this machine as a device, and their errors on computations that are not fitted."""

import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

import torch

from twoaxis.core.errors import ConfigError, problem
from twoaxis.core.files import replacing
from twoaxis.planner.formulas.roofline import Data, bound_by, compute_seconds, launch_seconds, memory_seconds, total_seconds
from twoaxis.planner.hardware import ceilings
from twoaxis.planner.hardware.ceilings import Clock, Sample, Stopwatch, Work, fit_efficiency, fit_memory, fit_products
from twoaxis.planner.hardware.device import SHIPPED, Cache, Device, Figure, NumberFormat, Source, device_text
from twoaxis.planner.hardware.held_out import held_out

LIMIT_SECONDS = 20.0

DISTURBED = 1.25
"""Another process used the machine if a quarter of all spreads is above this."""

SOURCE = "calibration"

SHARES = 4
"""A held-out computation takes a quarter of the time that is left."""

NUMBER_FORMATS = {"cpu": {"fp32": torch.float32}, "cuda": {"bf16": torch.bfloat16, "fp32": torch.float32}}
"""Formats of the matrix products that are measured, by device type; the first is that of held-out computations."""

Measure = Callable[[Work], Sample]


@dataclass(frozen=True)
class Ceiling:
    """Measured and fitted seconds of one operation."""

    name: str
    measured_seconds: float
    fitted_seconds: float
    spread: float

    @property
    def ratio(self) -> float:
        """Fitted over measured."""
        return self.fitted_seconds / self.measured_seconds


@dataclass(frozen=True)
class Prediction:
    """Seconds of one computation that was not fitted, predicted from the counts of its operators.

    Attributes:
        operators: how many there are.
        bound: where most of the predicted seconds go: `compute`, `memory` or `launch`.
    """

    name: str
    operators: int
    predicted_seconds: float
    measured_seconds: float
    bound: str
    spread: float

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted_seconds / self.measured_seconds


@dataclass(frozen=True)
class Calibration:
    """The result of a calibration.

    Attributes:
        device: this machine.
        number_format: that of the held-out computations.
        ceilings: the fitted operations.
        predictions: the held-out computations.
        left_out: held-out computations that were skipped for lack of time.
    """

    device: Device
    number_format: str
    ceilings: tuple[Ceiling, ...]
    predictions: tuple[Prediction, ...]
    left_out: tuple[str, ...] = field(default=())

    @property
    def median_absolute_log_error(self) -> float:
        """The median of |log(predicted / measured)|; NaN without predictions."""
        return statistics.median(abs(math.log(p.ratio)) for p in self.predictions) if self.predictions else math.nan

    @property
    def disturbed(self) -> bool:
        """Whether runs of the same computation differed so much that another process must have used the machine."""
        spreads = [row.spread for row in (*self.ceilings, *self.predictions)]
        return 4 * sum(spread > DISTURBED for spread in spreads) >= len(spreads)

    def to_data(self) -> dict[str, Any]:
        """Plain JSON-ready data."""
        return {
            "device": self.device.to_data(),
            "number_format": self.number_format,
            "ceilings": [asdict(row) | {"ratio": row.ratio} for row in self.ceilings],
            "predictions": [asdict(row) | {"ratio": row.ratio} for row in self.predictions],
            "median_absolute_log_error": self.median_absolute_log_error if self.predictions else None,
            "disturbed": self.disturbed,
            "left_out": list(self.left_out),
        }


def calibrate(
    limit_seconds: float = LIMIT_SECONDS,
    name: str = "this-machine",
    device: torch.device | None = None,
    measure: Measure | None = None,
    clock: Clock = time.perf_counter,
) -> Calibration:
    """Measures matrix products, copies, launches and functions, fits the rates, and predicts whole computations with them.

    The fitted operations take half of the time; held-out computations follow while time is left.

    Args:
        limit_seconds: for everything.
        name: of the new device.
        device: what to measure; None is the first GPU, else the CPU with the threads that torch uses.
        measure: times a computation instead of the stopwatch.
        clock: of the stopwatch. With one thread, `time.process_time` leaves out other processes.

    Raises:
        ConfigError: no time, a device of another type, or an implausible measurement.
    """
    if device is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type not in NUMBER_FORMATS:
        raise ConfigError(problem("device", str(device), "a cpu or a cuda device", "calibrate one of these"))
    formats = NUMBER_FORMATS[device.type]
    main = next(iter(formats))
    watch = Stopwatch(limit_seconds, clock, torch.cuda.synchronize if device.type == "cuda" else lambda: None)
    works = _Works.of(device, formats)
    share = limit_seconds / 2 / len(works.all)
    found = [(work, measure(work) if measure else watch.measure(work.prepare(), share)) for work in works.all]
    fitted = _fitted(name, device, works, {work.name: sample.seconds for work, sample in found})
    predictions, left_out = _predictions(held_out(device, formats[main]), fitted.numbers(main, "eager"), measure, watch)
    return Calibration(fitted, main, tuple(_rows(works, found, fitted)), tuple(predictions), tuple(left_out))


@dataclass(frozen=True)
class _Works:
    """The operations that a calibration fits."""

    products: dict[str, list[Work]]
    copies: list[Work]
    elementwise: list[Work]
    functions: Work
    launches: Work
    small_model: Work

    @classmethod
    def of(cls, device: torch.device, formats: dict[str, torch.dtype]) -> Self:
        """For one device and the formats of its matrix products."""
        return cls(
            {known: ceilings.products(device, dtype) for known, dtype in formats.items()},
            ceilings.copies(device),
            ceilings.elementwise(device),
            ceilings.functions(device),
            ceilings.launches(device),
            ceilings.small_model(device, next(iter(formats.values()))),
        )

    @property
    def all(self) -> list[Work]:
        """All operations."""
        single = [self.functions, self.launches, self.small_model]
        return [*(work for works in self.products.values() for work in works), *self.copies, *self.elementwise, *single]


def _fitted(name: str, device: torch.device, works: _Works, seconds: dict[str, float]) -> Device:
    """The device with the fitted rates."""

    def of(some: list[Work]) -> tuple[list[Data], list[float]]:
        return [work.operators[0] for work in some], [seconds[work.name] for work in some]

    def figure(value: float) -> Figure:
        return Figure(value=float(value), source=SOURCE)

    launch = seconds[works.launches.name] / len(works.launches.operators)
    copies, copy_seconds = of(works.copies)
    caches, memory_rate = fit_memory([op["bytes"] for op in copies], copy_seconds, launch)
    fits = {known: fit_products(*of(products), launch) for known, products in works.products.items()}
    rates = {"caches": [list(cache) for cache in caches], "bytes_per_second": memory_rate, "launch_seconds": launch}
    function_seconds = max(seconds[works.functions.name] - launch, 1e-12)
    return Device(
        name=name,
        description=_description(device),
        sources={
            SOURCE: Source(basis="measured", text=f"twoaxis plan --calibrate, torch {torch.__version__}; rates as reached")
        },
        peak_flops_per_second={NumberFormat(known): figure(rate) for known, (rate, _) in fits.items()},
        vector_flops_per_second=figure(works.functions.operators[0]["vector_flops"] / function_seconds),
        memory_bytes=figure(_memory_bytes(device)),
        memory_bandwidth_bytes_per_second=figure(memory_rate),
        caches=tuple(Cache(bytes=figure(size), bandwidth_bytes_per_second=figure(rate)) for size, rate in caches),
        kernel_launch_seconds=figure(launch),
        eager_launch_seconds=figure(seconds[works.small_model.name] / len(works.small_model.operators)),
        matmul_efficiency=figure(1.0),
        matmul_half_size=figure(next(iter(fits.values()))[1]),
        bandwidth_efficiency=figure(fit_efficiency(*of(works.elementwise), rates)),
    )


def _rows(works: _Works, found: list[tuple[Work, Sample]], fitted: Device) -> Iterator[Ceiling]:
    """Measured and fitted seconds of each operation."""
    copying = fitted.replace(bandwidth_efficiency=Figure(value=1.0, source=SOURCE))
    main = next(iter(works.products))
    of_format = {work.name: known for known, products in works.products.items() for work in products}
    for work, sample in found:
        rates = (copying if work in works.copies else fitted).numbers(of_format.get(work.name, main))
        if work is works.small_model:
            rates = fitted.numbers(main, "eager")
        yield Ceiling(work.name, sample.seconds, total_seconds(list(work.operators), rates), sample.spread)


def _predictions(
    works: Iterable[Work], rates: Data, measure: Measure | None, watch: Stopwatch
) -> tuple[list[Prediction], list[str]]:
    """Predictions with measurements, and the names of computations that were skipped for lack of time."""
    found, left_out = [], []
    for work in works:
        if measure is None and watch.left_seconds <= 0:
            left_out.append(work.name)
            continue
        sample = measure(work) if measure else watch.measure(work.prepare(), watch.left_seconds / SHARES)
        seconds = total_seconds(list(work.operators), rates)
        found.append(Prediction(work.name, len(work.operators), seconds, sample.seconds, _bound(work, rates), sample.spread))
    return found, left_out


def _bound(work: Work, rates: Data) -> str:
    """Where most of the predicted seconds go: of each operator its launch, and the slower of compute and memory."""
    spent = {"compute": 0.0, "memory": 0.0, "launch": 0.0}
    for op in work.operators:
        compute, memory = compute_seconds(op, rates), memory_seconds(op["bytes"], rates)
        spent["launch"] += launch_seconds(op, rates)
        spent["compute" if compute >= memory else "memory"] += max(compute, memory)
    return bound_by(spent["compute"], spent["memory"], spent["launch"], 0.0)


def _description(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, {platform.system()}"


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def write_device(device: Device, path: Path, existing: Literal["keep", "replace"] = "keep") -> None:
    """Writes the file of a device atomically.

    Args:
        device: to write.
        path: of the file, which ends in .toml.
        existing: whether an existing file is kept, which is an error, or replaced; files of the library are always kept.

    Raises:
        ConfigError: another suffix, or a file that is kept.
        DataError: the file cannot be written.
    """
    if path.suffix != ".toml":
        raise ConfigError(problem("path", str(path), "a file that ends in .toml", f"write to {path.with_suffix('.toml')}"))
    if path.resolve().parent == SHIPPED.resolve():
        raise ConfigError(f"{path}: comes with the library and is never replaced; write to another folder")
    if existing == "keep" and path.exists():
        raise ConfigError(f"{path}: exists and stays; write to another file, or ask to replace it")
    with replacing(path) as file:
        file.write(device_text(device).encode())
