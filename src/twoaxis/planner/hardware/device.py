"""Peak figures of a device, each with its source."""

import json
import re
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from twoaxis.core.config import Config, read_config_file
from twoaxis.core.errors import ConfigError, nearest, problem

SHIPPED = Path(__file__).with_name("devices")
"""The folder of the devices of the library, one file each."""


class NumberFormat(StrEnum):
    """Number format of the inputs of matrix products; `tf32` is float32 on tensor cores."""

    FP64 = "fp64"
    FP32 = "fp32"
    TF32 = "tf32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"


class Source(Config):
    """The source of figures.

    Args:
        basis: `published` by the maker or in a paper, `measured` here or by others, or `assumed`.
        text: the reference, or why it is assumed.
    """

    basis: Literal["published", "measured", "assumed"]
    text: str = Field(min_length=1)


class Figure(Config):
    """One number, and the name of its source among the device's `sources`."""

    # The range of each figure also refuses infinity and NaN, in a message with its unit.
    value: float = Field(allow_inf_nan=True)
    source: str


class Range(Config):
    """The plausible values of one kind of figure, and their unit."""

    least: float
    most: float
    unit: str
    such_as: str


FLOP_RATE = Range(least=1e9, most=1e17, unit="FLOPs per second", such_as="989e12")
CAPACITY = Range(least=1e8, most=1e14, unit="bytes", such_as="80e9")
CACHE = Range(least=1e4, most=1e11, unit="bytes", such_as="32e6")
BANDWIDTH = Range(least=1e9, most=1e14, unit="bytes per second", such_as="3.35e12")
LINK = Range(least=1e7, most=1e13, unit="bytes per second and direction", such_as="450e9")
DELAY = Range(least=1e-9, most=1e-1, unit="seconds", such_as="3e-6")
FRACTION = Range(least=1e-3, most=1.0, unit="as a fraction of the peak", such_as="0.8")
SIZE = Range(least=0.0, most=1e5, unit="rows or columns", such_as="256")
COUNT = Range(least=1.0, most=1e5, unit="devices", such_as="8")


class Link(Config):
    """A link between devices.

    Args:
        bandwidth_bytes_per_second: of all links of one device together, in one direction.
        pair_bandwidth_bytes_per_second: between two devices; left out if a switch gives them all of it.
        latency_seconds: from the call to the first byte.
        efficiency: the fraction of the bandwidth that long messages reach.
        devices: the number of devices that it connects; left out if there is no limit.
    """

    bandwidth_bytes_per_second: Figure
    pair_bandwidth_bytes_per_second: Figure | None = None
    latency_seconds: Figure
    efficiency: Figure
    devices: Figure | None = None

    def numbers(self) -> dict[str, float]:
        """The rates that messages over it reach, and the latency."""
        pair = self.pair_bandwidth_bytes_per_second or self.bandwidth_bytes_per_second
        return {
            "bytes_per_second": self.bandwidth_bytes_per_second.value * self.efficiency.value,
            "pair_bytes_per_second": pair.value * self.efficiency.value,
            "latency_seconds": self.latency_seconds.value,
        }


class Cache(Config):
    """A cache that the whole device shares, or the sum of those of its cores.

    Args:
        bytes: its size.
        bandwidth_bytes_per_second: reads and writes together.
    """

    bytes: Figure
    bandwidth_bytes_per_second: Figure


RANGES = {
    "peak_flops_per_second": FLOP_RATE,
    "vector_flops_per_second": FLOP_RATE,
    "memory_bytes": CAPACITY,
    "memory_bandwidth_bytes_per_second": BANDWIDTH,
    "bytes": CACHE,
    "kernel_launch_seconds": DELAY,
    "eager_launch_seconds": DELAY,
    "matmul_efficiency": FRACTION,
    "matmul_half_size": SIZE,
    "bandwidth_efficiency": FRACTION,
    "bandwidth_bytes_per_second": LINK,
    "pair_bandwidth_bytes_per_second": LINK,
    "latency_seconds": DELAY,
    "efficiency": FRACTION,
    "devices": COUNT,
}
"""The range of each figure, by name."""


class Device(Config):
    """A processor with its memory, and how devices of its kind are connected.

    Args:
        name: on the command line.
        description: the exact product.
        sources: of the figures, by the names that figures refer to.
        peak_flops_per_second: of dense matrix products, by number format.
        vector_flops_per_second: of all operations other than matrix products, in float32.
        memory_bytes: available to tensors.
        memory_bandwidth_bytes_per_second: reads and writes together.
        caches: from small to large; left out if tensors of a model are larger anyway.
        kernel_launch_seconds: overhead of one kernel in a compiled program or a recorded graph.
        eager_launch_seconds: the same if PyTorch and the Python of a model launch it, operation by operation.
        matmul_efficiency: the fraction of the peak that large matrix products reach.
        matmul_half_size: the harmonic size at which they reach half of that, see `formulas.roofline.matmul_efficiency`.
        bandwidth_efficiency: the fraction of the memory bandwidth that large operations reach.
        fast_link: NVLink, Infinity Fabric, or another link between the devices of one domain.
        network: between domains.

    Raises:
        ConfigError: an implausible figure, such as one in another unit, or one without a source.

    Example:
        >>> read_device("h100").peak_flops_per_second["bf16"].value
        989400000000000.0
    """

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")
    description: str
    sources: dict[str, Source]
    peak_flops_per_second: dict[NumberFormat, Figure] = Field(min_length=1)
    vector_flops_per_second: Figure
    memory_bytes: Figure
    memory_bandwidth_bytes_per_second: Figure
    caches: tuple[Cache, ...] = ()
    kernel_launch_seconds: Figure
    eager_launch_seconds: Figure
    matmul_efficiency: Figure
    matmul_half_size: Figure
    bandwidth_efficiency: Figure
    fast_link: Link | None = None
    network: Link | None = None

    @model_validator(mode="after")
    def _plausible(self) -> Self:
        for path, figure in self.figures().items():
            # In a table by number format, the name of the table is that of its figures.
            limits = RANGES[next(part for part in reversed(path.split(".")) if part in RANGES)]
            if not limits.least <= figure.value <= limits.most:
                allowed = f"{limits.least:g} to {limits.most:g} {limits.unit}"
                raise ConfigError(
                    problem(path, figure.value, allowed, f"are the units mixed up? write for example {limits.such_as}")
                )
            if figure.source not in self.sources:
                known = nearest(figure.source, self.sources) if self.sources else "add it there"
                raise ConfigError(f"{path}: its source {figure.source!r} is not among the sources of {self.name}; {known}")
        sizes = [cache.bytes.value for cache in self.caches]
        if sizes != sorted(sizes):
            raise ConfigError(problem("caches", sizes, "in order of their size, the smallest first", "sort them"))
        return self

    def figures(self) -> dict[str, Figure]:
        """Every figure by its path in the file."""
        found: dict[str, Figure] = {}
        for name in type(self).model_fields:
            value = getattr(self, name)
            if isinstance(value, Figure):
                found[name] = value
            elif isinstance(value, Link):
                parts = {part: getattr(value, part) for part in type(value).model_fields}
                found |= {f"{name}.{part}": figure for part, figure in parts.items() if figure is not None}
            elif name == "caches":
                for index, cache in enumerate(self.caches):
                    found |= {f"caches.{index}.{part}": getattr(cache, part) for part in type(cache).model_fields}
            elif name == "peak_flops_per_second":
                found |= {f"{name}.{number_format}": figure for number_format, figure in value.items()}
        return found

    def numbers(self, number_format: str, launched: Literal["compiled", "eager"] = "compiled") -> dict[str, Any]:
        """The rates that `formulas.roofline` needs: reached ones, not peaks.

        Args:
            number_format: of the matrix products.
            launched: whether kernels are launched by a compiled program or a recorded graph, or eagerly.

        Raises:
            ConfigError: a format without a peak on this device.
        """
        peaks = {str(known): figure.value for known, figure in self.peak_flops_per_second.items()}
        if number_format not in peaks:
            raise ConfigError(f"{self.name} has no matrix products in {number_format!r}; {nearest(number_format, peaks)}")
        launch = {"compiled": self.kernel_launch_seconds, "eager": self.eager_launch_seconds}[launched]
        reached = self.bandwidth_efficiency.value
        return {
            "flops_per_second": peaks[number_format] * self.matmul_efficiency.value,
            "matmul_half_size": self.matmul_half_size.value,
            "vector_flops_per_second": self.vector_flops_per_second.value,
            "bytes_per_second": self.memory_bandwidth_bytes_per_second.value * reached,
            "caches": [[cache.bytes.value, cache.bandwidth_bytes_per_second.value * reached] for cache in self.caches],
            "launch_seconds": launch.value,
        }

    def link(self, devices: int) -> Link:
        """The link between so many devices: the fast link if it reaches all of them, else the network.

        Raises:
            ConfigError: the file of the device does not connect them.
        """
        fast = self.fast_link
        if fast is not None and (fast.devices is None or devices <= fast.devices.value):
            return fast
        if self.network is None:
            reach = int(fast.devices.value) if fast is not None and fast.devices is not None else 1
            allowed = f"at most {reach} of {self.name}, which has no network"
            raise ConfigError(problem("gpus", devices, allowed, "add a table [network] to the file of the device"))
        return self.network


def shipped_devices() -> tuple[str, ...]:
    """The names of the devices of the library."""
    return tuple(sorted(path.stem for path in SHIPPED.glob("*.toml")))


def read_device(name_or_path: str | Path) -> Device:
    """Reads a device of the library by its name, or any by the path of its file, which ends in .toml or .json.

    Raises:
        ConfigError: an unknown name, an unreadable file, or invalid figures.
    """
    if isinstance(name_or_path, str) and not re.search(r"[/\\]|\.(toml|json)$", name_or_path):
        if name_or_path not in shipped_devices():
            remedy = nearest(name_or_path, shipped_devices())
            raise ConfigError(f"unknown device {name_or_path!r} (of your own: a path that ends in .toml or .json); {remedy}")
        path = SHIPPED / f"{name_or_path}.toml"
    else:
        path = Path(name_or_path)
    data = read_config_file(path, "device")
    try:
        return Device.from_data(data)
    except ConfigError as error:
        raise ConfigError(f"device {path}: {error}") from None


def device_text(device: Device) -> str:
    """The device as the text of its TOML file, which `read_device` reads back to an equal device."""
    lines = [f"{name} = {_quoted(getattr(device, name))}" for name in ("name", "description")]
    tables: dict[str, list[str]] = {}
    for path, figure in device.figures().items():
        table, _, name = path.rpartition(".")
        tables.setdefault(table, []).append(f"{name} = {{ value = {figure.value!r}, source = {_quoted(figure.source)} }}")
    lines += tables.pop("", [])
    for table, figures in tables.items():
        lines += ["", "[[caches]]" if table.startswith("caches.") else f"[{table}]", *figures]
    for name, source in device.sources.items():
        lines += ["", f"[sources.{_quoted(name)}]", f"basis = {_quoted(source.basis)}", f"text = {_quoted(source.text)}"]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """A TOML string: as in JSON, with the delete character escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
