"""A calibration finds the rates behind the seconds it is given, predicts with them, and keeps to its time."""

import json
import math
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from twoaxis.core.errors import ConfigError
from twoaxis.planner.formulas.roofline import harmonic_size, operator, total_seconds
from twoaxis.planner.hardware import read_device
from twoaxis.planner.hardware.calibrate import Calibration, calibrate, write_device
from twoaxis.planner.hardware.ceilings import (
    COPIES_BYTES,
    MOST_RUNS,
    WARMUP_RUNS,
    Sample,
    Stopwatch,
    Work,
    fit_efficiency,
    fit_memory,
    fit_products,
    products,
)
from twoaxis.planner.hardware.counted import FUNCTION_FLOPS, eager_operators
from twoaxis.planner.hardware.device import SHIPPED

CPU = torch.device("cpu")
LAUNCH, EAGER = 2e-6, 3e-5
PLANTED = {
    "flops_per_second": 2e11,
    "matmul_half_size": 5.0,
    "vector_flops_per_second": 3e10,
    "bytes_per_second": 1e10,
    "caches": [[float(2**21), 1e11], [float(2**25), 4e10]],
    "launch_seconds": LAUNCH,
}


def fake_machine(work: Work) -> Sample:
    """The seconds that a machine with the planted rates takes; elementwise operations reach half the rate of copies."""
    rates = dict(PLANTED)
    if "decoder" in work.name or "of [4, 512, 256]" in work.name or "attention" in work.name:
        rates["launch_seconds"] = EAGER
    if not work.name.startswith("copy"):
        rates |= {"bytes_per_second": 5e9, "caches": [[size, rate / 2] for size, rate in PLANTED["caches"]]}
    return Sample(total_seconds(list(work.operators), rates))


@pytest.fixture(scope="module")
def calibration() -> Calibration:
    return calibrate(device=CPU, measure=fake_machine, name="planted")


def test_a_calibration_recovers_planted_rates(calibration: Calibration) -> None:
    found = {path: figure.value for path, figure in calibration.device.figures().items()}
    assert found["peak_flops_per_second.fp32"] == pytest.approx(2e11, rel=0.01)
    assert found["matmul_half_size"] == pytest.approx(5.0, rel=0.05)
    assert found["memory_bandwidth_bytes_per_second"] == pytest.approx(1e10)
    assert [found[f"caches.{i}.{part}"] for i in (0, 1) for part in ("bytes", "bandwidth_bytes_per_second")] == pytest.approx(
        [2**21, 1e11, 2**25, 4e10]
    )
    assert found["bandwidth_efficiency"] == pytest.approx(0.5)
    assert found["kernel_launch_seconds"] == pytest.approx(LAUNCH)
    assert found["eager_launch_seconds"] == pytest.approx(EAGER, rel=0.01)
    assert found["vector_flops_per_second"] == pytest.approx(3e10, rel=0.01)
    assert all(row.ratio == pytest.approx(1.0, rel=0.02) for row in calibration.ceilings)


def test_its_predictions_are_then_right(calibration: Calibration) -> None:
    assert len(calibration.predictions) >= 7 and not calibration.left_out and not calibration.disturbed
    assert all(row.ratio == pytest.approx(1.0, rel=0.02) for row in calibration.predictions)
    assert calibration.median_absolute_log_error < 0.02
    assert {row.bound for row in calibration.predictions} == {"compute", "memory", "launch"}
    names = {row.name for row in calibration.ceilings}
    assert names.isdisjoint(row.name for row in calibration.predictions)


def test_errors_of_predictions_are_told(calibration: Calibration) -> None:
    slower = tuple(replace(row, measured_seconds=2 * row.measured_seconds) for row in calibration.predictions)
    found = replace(calibration, predictions=slower)
    assert found.median_absolute_log_error == pytest.approx(math.log(2), abs=0.02)
    data = found.to_data()
    assert json.loads(json.dumps(data)) == data
    assert data["predictions"][0]["ratio"] == pytest.approx(1 / 2, rel=0.02)


def test_a_disturbed_machine_is_called_so(calibration: Calibration) -> None:
    uneven = tuple(replace(row, spread=1.5) for row in calibration.ceilings)
    assert replace(calibration, ceilings=uneven).disturbed


def test_the_file_of_a_calibrated_device(calibration: Calibration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "here" / "planted.toml"
    write_device(calibration.device, path)
    assert read_device(path) == calibration.device
    with pytest.raises(ConfigError, match=r"planted.toml: exists and stays; write to another file, or ask to replace it"):
        write_device(calibration.device, path)
    before = path.read_bytes()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        write_device(calibration.device.replace(name="other"), path, existing="replace")
    assert path.read_bytes() == before and [p.name for p in path.parent.iterdir()] == [path.name]
    write_device(calibration.device.replace(name="other"), path, existing="replace")
    assert read_device(path).name == "other"


def test_what_is_never_written(calibration: Calibration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A copy, so that a guard that fails costs no file of the library.
    shipped = tmp_path / "devices"
    shutil.copytree(SHIPPED, shipped)
    monkeypatch.setattr("twoaxis.planner.hardware.calibrate.SHIPPED", shipped)
    for name in ("h100.toml", "new.toml"):
        with pytest.raises(ConfigError, match="comes with the library and is never replaced"):
            write_device(calibration.device, tmp_path / "x" / ".." / "devices" / name, existing="replace")
    assert (shipped / "h100.toml").read_bytes() == (SHIPPED / "h100.toml").read_bytes()
    with pytest.raises(ConfigError, match=r"must be a file that ends in \.toml; write to .*x\.toml"):
        write_device(calibration.device, tmp_path / "x.json")
    with pytest.raises(ConfigError, match=r"^device='meta': must be a cpu or a cuda device"):
        calibrate(device=torch.device("meta"), measure=fake_machine)


class FakeClock:
    """A clock that advances when something runs."""

    def __init__(self, *durations: float) -> None:
        self.now, self.runs, self._durations = 100.0, 0, durations

    def __call__(self) -> float:
        return self.now

    def run(self) -> None:
        self.now += self._durations[min(self.runs, len(self._durations) - 1)]
        self.runs += 1


def test_a_stopwatch_warms_up_and_takes_the_median() -> None:
    clock = FakeClock(50.0, 50.0, 1.0, 9.0, 2.0)
    watch = Stopwatch(1000.0, clock)
    sample = watch.measure(clock.run, share_seconds=0.0)
    assert (sample.seconds, sample.runs, clock.runs) == (2.0, 3, WARMUP_RUNS + 3)
    assert sample.spread == pytest.approx(9.0)
    assert watch.left_seconds == pytest.approx(1000.0 - 112.0)


def test_a_stopwatch_keeps_to_its_share_and_waits_for_the_device() -> None:
    clock, waits = FakeClock(1.0), []
    sample = Stopwatch(1000.0, clock, wait=lambda: waits.append(clock.runs)).measure(clock.run, share_seconds=10.0)
    assert sample.runs == 10 - WARMUP_RUNS and waits == list(range(1, 11))
    assert Stopwatch(1e9, FakeClock(), wait=lambda: None).left_seconds == 1e9
    quick = FakeClock(1e-9)
    assert Stopwatch(1000.0, quick).measure(quick.run, share_seconds=10.0).runs == MOST_RUNS


@pytest.mark.parametrize("limit", [0.0, -1.0, math.inf, math.nan])
def test_a_limit_is_a_time(limit: float) -> None:
    with pytest.raises(ConfigError, match=r"^seconds=.*: must be a positive number of seconds"):
        calibrate(limit, device=CPU)


def test_without_time_ceilings_are_measured_and_predictions_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(10**9))
    monkeypatch.setattr("twoaxis.planner.hardware.ceilings.COPIES_BYTES", COPIES_BYTES[:6])
    # Every look at this clock is 10 us later, so everything takes 10 us and the limit is over at once.
    found = calibrate(1e-5, device=CPU, clock=lambda: 1e-5 * next(ticks))
    assert found.ceilings and not found.predictions and len(found.left_out) >= 7
    assert math.isnan(found.median_absolute_log_error) and found.to_data()["median_absolute_log_error"] is None


def test_fits_of_what_no_machine_gives_stay_usable() -> None:
    ops = [operator(2.0 * n**3, harmonic_size(n, n, n), 0.0, 0.0, 1.0) for n in (64, 256, 1024)]
    falling = [op["matmul_flops"] / rate for op, rate in zip(ops, (3e11, 2e11, 1e11), strict=True)]
    assert fit_products(ops, falling, 0.0) == (pytest.approx(2e11), 0.0)
    assert fit_memory([1e6, 2e6, 4e6], [1e-4, 2e-4, 4e-4], 0.0) == ([], pytest.approx(1e10))
    # Rates that rise with the size are no caches.
    assert fit_memory([1e6, 2e6, 4e6], [1e-4, 1.5e-4, 2e-4], 0.0)[0] == []
    rates = {"caches": [], "bytes_per_second": 1e9, "launch_seconds": 0.0}
    moved = [operator(0.0, 0.0, 0.0, 1e6, 1.0)]
    assert fit_efficiency(moved, [2e-3], rates) == pytest.approx(0.5) and fit_efficiency(moved, [5e-4], rates) == 1.0


def test_ceilings_count_what_runs() -> None:
    for work in products(CPU, torch.float32)[:3]:
        (counted,) = eager_operators(work.prepare())
        declared = dict(work.operators[0])
        # The result is among what an operation with `out` is given, and is counted as read too.
        assert counted.pop("bytes") >= declared.pop("bytes") and counted == declared


def test_operators_of_a_computation_with_its_backward_pass() -> None:
    x, w = torch.ones(6, 4, requires_grad=True), torch.ones(4, 8, requires_grad=True)
    found = eager_operators(lambda: (x @ w).exp().sum().backward())
    flops = [op["matmul_flops"] for op in found if op["matmul_flops"]]
    assert flops == [2 * 6 * 4 * 8] * 3
    assert FUNCTION_FLOPS * 48 in [op["vector_flops"] for op in found]
    assert all(op["kernels"] == 1 for op in found)


def test_inference_hides_no_products() -> None:
    layer, x = torch.nn.Linear(4, 8, bias=False), torch.ones(6, 4)
    with torch.inference_mode():
        found = eager_operators(lambda: layer(x))
    assert sum(op["matmul_flops"] for op in found) == 2 * 6 * 4 * 8


@pytest.mark.parametrize(
    ("causal", "tokens", "pairs"),
    [(False, 1000, 1000**2), (True, 1000, 512 * 512 + 488 * 1000), (True, 600, 512 * 512 + 88 * 600), (True, 64, 64 * 64)],
)
def test_attention_computes_whole_blocks_of_keys(causal: bool, tokens: int, pairs: int) -> None:
    q = torch.ones(1, 2, tokens, 8, requires_grad=True)
    found = eager_operators(lambda: F.scaled_dot_product_attention(q, q, q, is_causal=causal).sum().backward())
    assert [op["matmul_flops"] for op in found if op["matmul_flops"]] == [2 * 4 * 8 * pairs, 2 * 10 * 8 * pairs]
