"""Devices: every figure has a source and can be meant; and the roofline says what they take."""

import math
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twoaxis.core.errors import ConfigError
from twoaxis.planner.formulas.roofline import (
    bound,
    bound_by,
    compute_seconds,
    fused,
    harmonic_size,
    memory_seconds,
    operator,
    operator_seconds,
    total_seconds,
)
from twoaxis.planner.hardware import Device, device_text, read_device, shipped_devices
from twoaxis.planner.hardware.device import SHIPPED

RATES = {
    "flops_per_second": 100.0,
    "matmul_half_size": 4.0,
    "vector_flops_per_second": 10.0,
    "bytes_per_second": 8.0,
    "caches": [[16.0, 64.0], [64.0, 16.0]],
    "launch_seconds": 0.5,
}


def data_of(name: str) -> dict[str, Any]:
    return tomllib.loads((SHIPPED / f"{name}.toml").read_text())


def test_the_devices_that_are_promised() -> None:
    assert set(shipped_devices()) >= {"a100", "b200", "cpu-2-core", "h100", "h200", "mi300x"}


@pytest.mark.parametrize("name", shipped_devices())
def test_a_shipped_device_is_named_after_its_file_uses_all_its_sources_and_survives_its_own_text(
    name: str, tmp_path: Path
) -> None:
    device = read_device(name)
    assert device.name == name
    assert {figure.source for figure in device.figures().values()} == set(device.sources)
    copy = tmp_path / "copy.toml"
    copy.write_text(device_text(device))
    assert read_device(copy) == read_device(str(copy)) == device == Device.from_data(device.to_data())


@pytest.mark.parametrize("name", sorted(set(shipped_devices()) - {"cpu-2-core"}))
def test_dense_peaks_double_with_half_the_bits(name: str) -> None:
    peaks = {str(known): figure.value for known, figure in read_device(name).peak_flops_per_second.items()}
    assert peaks["bf16"] == peaks["fp16"] == pytest.approx(2 * peaks["tf32"], rel=0.03)
    assert peaks.get("fp8", 2 * peaks["bf16"]) == pytest.approx(2 * peaks["bf16"], rel=0.001)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"memory_bandwidth_bytes_per_second": {"value": 3350.0, "source": "datasheet"}},
            "memory_bandwidth_bytes_per_second=3350.0: must be 1e+09 to 1e+14 bytes per second; are the units mixed up? "
            "write for example 3.35e12",
        ),
        (
            {"memory_bytes": {"value": 80, "source": "datasheet"}},
            "memory_bytes=80.0: must be 1e+08 to 1e+14 bytes; are the units mixed up? write for example 80e9",
        ),
        (
            {"peak_flops_per_second": {"bf16": {"value": 989.4, "source": "datasheet"}}},
            "peak_flops_per_second.bf16=989.4: must be 1e+09 to 1e+17 FLOPs per second; are the units mixed up? write for "
            "example 989e12",
        ),
        (
            {"kernel_launch_seconds": {"value": 3.0, "source": "launch"}},
            "kernel_launch_seconds=3.0: must be 1e-09 to 0.1 seconds; are the units mixed up? write for example 3e-6",
        ),
        (
            {"matmul_efficiency": {"value": 80.3, "source": "matmul"}},
            "matmul_efficiency=80.3: must be 0.001 to 1 as a fraction of the peak; are the units mixed up? write for "
            "example 0.8",
        ),
        (
            {"bandwidth_efficiency": {"value": math.nan, "source": "bandwidth"}},
            "bandwidth_efficiency=nan: must be 0.001 to 1 as a fraction of the peak; are the units mixed up? write for "
            "example 0.8",
        ),
        (
            {"memory_bytes": {"value": 80e9, "source": "datasheeet"}},
            "memory_bytes: its source 'datasheeet' is not among the sources of h100; did you mean 'datasheet'?",
        ),
        (
            {"memory_bytes": {"value": 80e9}},
            "memory_bytes: source is missing in the figure: it has no default; add it",
        ),
        (
            {"memory_bytes": {"value": "80e9", "source": "datasheet"}},
            "memory_bytes: value='80e9': must be a number; correct it in the figure",
        ),
        ({"memory_byte": 1}, "unknown key 'memory_byte' in the device; did you mean 'memory_bytes'?"),
        (
            {"peak_flops_per_second": {"bf17": {"value": 989e12, "source": "datasheet"}}},
            "peak_flops_per_second.bf17.[key]='bf17': must be 'fp64', 'fp32', 'tf32', 'bf16', 'fp16' or 'fp8'; "
            "correct it in the device",
        ),
    ],
)
def test_figures_that_cannot_be_meant(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Device.from_data(data_of("h100") | change)
    assert str(caught.value) == message


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("path", sorted(read_device("mi300x").figures()))
def test_no_figure_is_zero_negative_or_no_number(path: str, value: float) -> None:
    data = data_of("mi300x")
    *tables, name = path.split(".")
    table = data
    for step in tables:
        table = table[step]
    table[name]["value"] = value
    if path == "matmul_half_size" and value == 0:
        assert Device.from_data(data).matmul_half_size.value == 0
        return
    with pytest.raises(ConfigError, match=rf"^{path}="):
        Device.from_data(data)


def test_caches_stand_in_order() -> None:
    data = data_of("cpu-2-core")
    small = {"bytes": {"value": 1e6, "source": "copies"}, "bandwidth_bytes_per_second": {"value": 2e11, "source": "copies"}}
    assert len(Device.from_data(data | {"caches": [small, *data["caches"]]}).caches) == 2
    with pytest.raises(ConfigError, match=r"^caches=\[32000000.0, 1000000.0\]: must be in order of their size"):
        Device.from_data(data | {"caches": [*data["caches"], small]})


def test_an_unknown_device_and_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^unknown device 'h10' \(of your own: a path .*\); did you mean 'h100'\?$"):
        read_device("h10")
    with pytest.raises(ConfigError, match=r"device .*none\.toml: cannot be read"):
        read_device(tmp_path / "none.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("name = ")
    with pytest.raises(ConfigError, match="is not toml"):
        read_device(str(broken))
    broken.write_text('name = "x"')
    with pytest.raises(ConfigError, match=r"^device .*broken.toml: description is missing in the device"):
        read_device(str(broken))


def test_numbers_are_what_is_reached() -> None:
    device = read_device("h100")
    numbers = device.numbers("bf16")
    assert numbers["flops_per_second"] == pytest.approx(989.4e12 * 0.803)
    assert numbers["bytes_per_second"] == pytest.approx(3.35e12 * 0.867)
    assert numbers["launch_seconds"] == 3e-6 and device.numbers("bf16", "eager")["launch_seconds"] == 10e-6
    with pytest.raises(ConfigError, match=r"a100 has no matrix products in 'fp8'; choose one of"):
        read_device("a100").numbers("fp8")


def test_links_reach_as_far_as_they_say() -> None:
    device = read_device("h100")
    assert device.link(8) == device.fast_link and device.link(9) == device.network
    alone = device.replace(network=None)
    with pytest.raises(ConfigError, match=r"^gpus=9: must be at most 8 of h100, which has no network; add a table"):
        alone.link(9)
    with pytest.raises(ConfigError, match=r"^gpus=2: must be at most 1 of h100"):
        alone.replace(fast_link=None).link(2)
    pair = read_device("mi300x").link(2).numbers()
    assert pair["bytes_per_second"] == pytest.approx(7 * pair["pair_bytes_per_second"])
    assert device.link(2).numbers()["pair_bytes_per_second"] == device.link(2).numbers()["bytes_per_second"]


@pytest.mark.parametrize(
    ("op", "compute", "memory", "launch", "by"),
    [
        # At size 4 = half size, products run at half of 100 FLOPs per second.
        (operator(100.0, 4.0, 0.0, 8.0, 1.0), 2.0, 8 / 64, 0.5, "compute"),
        (operator(100.0, 12.0, 10.0, 8.0, 1.0), 4 / 3 + 1.0, 8 / 64, 0.5, "compute"),
        (operator(0.0, 0.0, 10.0, 64.0, 1.0), 1.0, 64 / 16, 0.5, "memory"),
        (operator(0.0, 0.0, 10.0, 80.0, 4.0), 1.0, 80 / 8, 2.0, "memory"),
        (operator(0.0, 0.0, 1.0, 16.0, 3.0), 0.1, 16 / 64, 1.5, "launch"),
    ],
)
def test_roofline(op: dict[str, float], compute: float, memory: float, launch: float, by: str) -> None:
    assert compute_seconds(op, RATES) == pytest.approx(compute)
    assert memory_seconds(op["bytes"], RATES) == pytest.approx(memory)
    assert operator_seconds(op, RATES) == pytest.approx(max(compute, memory) + launch)
    assert bound(op, RATES) == by


def test_a_link_can_bound_and_the_first_of_equals_wins() -> None:
    assert bound_by(1.0, 2.0, 3.0, 4.0) == "link"
    assert bound_by(1.0, 1.0, 1.0, 1.0) == "compute"


def test_fusing_keeps_the_work_and_drops_launches_and_traffic() -> None:
    parts = [operator(30.0, 3.0, 1.0, 50.0, 1.0), operator(0.0, 0.0, 2.0, 50.0, 1.0), operator(60.0, 12.0, 0.0, 50.0, 2.0)]
    whole = fused(parts, 20.0)
    assert whole == operator(90.0, 6.0, 3.0, 20.0, 1.0)
    assert compute_seconds(whole, RATES) == pytest.approx(sum(compute_seconds(part, RATES) for part in parts))
    assert operator_seconds(whole, RATES) < total_seconds(parts, RATES)
    assert fused(parts[1:2], 4.0) == operator(0.0, 0.0, 2.0, 4.0, 1.0)
    assert total_seconds([], RATES) == 0


SIDES = st.integers(1, 10**5)


@given(SIDES, SIDES, SIDES, st.integers(2, 8))
def test_a_larger_product_takes_longer_and_is_no_less_efficient(m: int, k: int, n: int, times: int) -> None:
    def product(*sides: int) -> dict[str, float]:
        return operator(2.0 * math.prod(sides), harmonic_size(*sides), 0.0, 0.0, 1.0)

    small, large = compute_seconds(product(m, k, n), RATES), compute_seconds(product(m * times, k, n), RATES)
    assert small < large <= times * small * (1 + 1e-12)
    assert harmonic_size(m, k, n) == pytest.approx(harmonic_size(n, m, k))


def test_decoding_on_a_gpu_is_bound_by_memory_and_prefill_by_products() -> None:
    rates = read_device("h100").numbers("bf16")
    weights = 8192 * 8192
    one = operator(2.0 * weights, harmonic_size(1, 8192, 8192), 0.0, 2.0 * weights, 1.0)
    many = operator(2.0 * 8192 * weights, harmonic_size(8192, 8192, 8192), 0.0, 3 * 2.0 * weights, 1.0)
    assert bound(one, rates) == "memory" and bound(many, rates) == "compute"
    assert operator_seconds(many, rates) == pytest.approx(2 * 8192 * weights / (989.4e12 * 0.803), rel=0.12)
