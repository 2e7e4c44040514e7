"""Parameters that declare their initial value and their tag.

A module is initialised when it is constructed, from torch's default generator like torch's modules, except on the meta device.
`initialise` sets new values from a seed and the full name of each parameter only. Two models that share a parameter name and
shape therefore share its value, and a model built on the meta device and materialised later has the values of one built
directly.
"""

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from twoaxis.core.errors import ConfigError, problem

Tag = Literal["matrix", "head", "embedding", "table", "norm", "bias", "gate", "query", "mixing"]
"""What a parameter is for; a `table` has rows that tokens look up, beside the embedding."""

Grows = Literal["both", "inputs", "outputs", "neither"]
"""The dimensions of a weight that grow with the width of the model: those that an output sums over, the outputs, or both."""

GROWS: dict[Tag, Grows] = {"matrix": "both", "head": "inputs", "query": "inputs", "gate": "neither", "mixing": "neither"}
"""The default of each tag; other tags are vectors of outputs."""


@dataclass(frozen=True)
class Constant:
    """The same value for every entry."""

    value: float


@dataclass(frozen=True)
class Values:
    """These entries, in order."""

    values: tuple[float, ...]


@dataclass(frozen=True)
class Normal:
    """Independent normal entries with mean 0 and this standard deviation."""

    std: float


@dataclass(frozen=True)
class NormalRows:
    """Independent normal entries with mean 0; the last rows have a standard deviation of their own.

    They are those of `Normal(std)`, the last rows times `last_std / std`.
    """

    std: float
    last_rows: int
    last_std: float


@dataclass(frozen=True)
class Uniform:
    """Independent entries, uniform between minus and plus this bound."""

    bound: float


@dataclass(frozen=True)
class UniformBetween:
    """Independent entries, uniform between these bounds."""

    low: float
    high: float


@dataclass(frozen=True)
class Striped:
    """This value where row and column of a matrix are equal modulo `period`, else 0; rows of one period are orthogonal."""

    value: float
    period: int


@dataclass(frozen=True)
class UniformPairs:
    """Pairs (u, 1 - u) on a last axis of two, with independent u, uniform between 0 and 1."""


@dataclass(frozen=True)
class LogOfUniform:
    """Logarithms of independent numbers, uniform between these bounds."""

    low: float
    high: float


@dataclass(frozen=True)
class SoftplusInverse:
    """Independent entries whose softplus is log-uniform between these bounds."""

    low: float
    high: float


Init = (
    Constant | Values | Normal | NormalRows | Uniform | UniformBetween | Striped | UniformPairs | LogOfUniform | SoftplusInverse
)


class Fused(NamedTuple):
    """Matrices stored as one parameter, side by side along a dimension: their sizes along it."""

    sizes: tuple[int, ...]
    dim: int = 0


@dataclass(frozen=True)
class Declaration:
    """How a parameter starts, and what an optimizer has to know of it.

    Attributes:
        init: the initial value.
        tag: the kind.
        dead: the reason why it may have no gradient, or None.
        lr_scale: a factor on its learning rate.
        fused: the matrices that it is made of; None for one.
        grows: its dimensions that grow with the width of the model; of fused matrices, those of each.
        stacked: the power of the depth with which equal changes of it in every layer grow in the stream: 1 where it multiplies
            or enters the stream itself, 1 more where it weights all earlier layers.
    """

    init: Init
    tag: Tag
    dead: str | None = None
    lr_scale: float = 1.0
    fused: Fused | None = None
    grows: Grows = "outputs"
    stacked: int = 0


def matrix_std(fan_in: int) -> float:
    """The standard deviation of weight matrices: 0.5 / sqrt(fan_in), which is GPT-2's 0.02 at width 625."""
    return 0.5 / math.sqrt(fan_in)


class DeclaredModule(nn.Module):
    """A module whose parameters are all declared and initialised by their declaration."""

    def __init__(self) -> None:
        super().__init__()
        self.declarations: dict[str, Declaration] = {}

    def parameter(
        self,
        name: str,
        shape: tuple[int, ...],
        init: Init,
        tag: Tag,
        dead: str | None = None,
        lr_scale: float = 1.0,
        *,
        fused: Fused | None = None,
        grows: Grows | None = None,
        stacked: int = 0,
    ) -> nn.Parameter:
        """Declares the parameter for the attribute `name`; sharding needs at least one dimension.

        Args:
            name: of the attribute.
            shape: of the parameter.
            init: the initial value.
            tag: the kind.
            dead: the reason why it may have no gradient.
            lr_scale: as in `Declaration`.
            fused: the matrices that it is made of.
            grows: as in `Declaration`; None means the default of the tag.
            stacked: as in `Declaration`.

        Raises:
            ConfigError: matrices that are not together as large as the parameter.
        """
        if fused is not None and sum(fused.sizes) != shape[fused.dim]:
            raise ConfigError(problem(f"fused of {name!r}", fused, f"sizes that add up to {shape[fused.dim]}", "correct them"))
        grows = grows or GROWS.get(tag, "outputs")
        self.declarations[name] = Declaration(init, tag, dead, lr_scale, fused, grows, stacked)
        value = torch.empty(shape)
        return nn.Parameter(value if value.is_meta else _draw(init, value.shape))

    def linear(
        self,
        name: str,
        d_in: int,
        d_out: int,
        std: float | None = None,
        values: tuple[int, float] | None = None,
        *,
        tag: Tag = "matrix",
        rows: tuple[int, ...] = (),
        grows: Grows | None = None,
    ) -> nn.Linear:
        """Declares the linear map without bias for the attribute `name`; `std=0` initialises it to zero.

        Args:
            name: of the attribute.
            d_in: width of the input.
            d_out: width of the output.
            std: of the initial weights; None means `matrix_std`.
            values: the number of last outputs with another standard deviation, and that.
            tag: the kind.
            rows: outputs of each of the matrices that are stored as this one; empty for one.
            grows: as in `Declaration`; None means the default of the tag.
        """
        std = matrix_std(d_in) if std is None else std
        init = Normal(std) if std else Constant(0.0)
        if values is not None and values[1] != std:
            init = NormalRows(std, *values)
        linear = _Undrawn(d_in, d_out, bias=False, device="meta")
        # Tools that look for the exact class find it.
        linear.__class__ = nn.Linear  # type: ignore[assignment]
        fused = Fused(rows) if rows else None
        linear.weight = self.parameter(f"{name}.weight", (d_out, d_in), init, tag, fused=fused, grows=grows)
        return linear


class _Undrawn(nn.Linear):
    """A linear map on the meta device, where PyTorch would draw a weight in Python only to have it replaced."""

    def reset_parameters(self) -> None:
        """Draws nothing."""


def extra_output(module: DeclaredModule, d_in: int, numbers: int) -> nn.Linear | None:
    """Declares the map for the attribute `extra` to numbers for the depth mixer; None without any."""
    return module.linear("extra", d_in, numbers, grows="inputs") if numbers else None


def with_extra(update: nn.Module, extra: nn.Module | None, hidden: Tensor) -> Tensor:
    """The update of a sublayer, followed on the last axis by its extra output for the depth mixer."""
    return update(hidden) if extra is None else torch.cat((update(hidden), extra(hidden)), dim=-1)


M = TypeVar("M", bound=nn.Module)


def materialize(build: Callable[[], M], device: torch.device | None = None) -> M:
    """Builds a module with uninitialised parameters and buffers, by default on torch's default device.

    `build` is called on the meta device, and nothing is drawn from a generator.

    Example:
        >>> materialize(lambda: nn.Linear(2, 3)).weight.device
        device(type='cpu')
    """
    device = torch.get_default_device() if device is None else device
    with torch.device("meta"):
        module = build()
    return module.to_empty(device=device)


def declarations(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, Declaration]]:
    """Yields every parameter once with its full name and declaration.

    Raises:
        ConfigError: a parameter without declaration, or a declaration without parameter.
    """
    found = _declared(model)
    existing = dict(model.named_parameters(remove_duplicate=False))
    if missing := found.keys() - existing.keys():
        raise ConfigError(f"parameter {min(missing)!r} is declared but does not exist; assign it to the attribute of its name")
    for name, parameter in model.named_parameters():
        if name not in found:
            raise ConfigError(
                f"parameter {name!r} declares no initial value and no tag; create it with self.parameter, which asks for both"
            )
        yield name, parameter, found[name]


def _declared(model: nn.Module) -> dict[str, Declaration]:
    """Every declaration by the full name of its parameter."""
    found: dict[str, Declaration] = {}
    for prefix, module in model.named_modules():
        if isinstance(module, DeclaredModule):
            found |= {f"{prefix}.{name}" if prefix else name: one for name, one in module.declarations.items()}
    return found


@torch.no_grad()
def initialise(model: nn.Module, seed: int) -> None:
    """Sets every declared parameter to its initial value for this seed, on its device."""
    for parameter, value in initial_values(model, seed):
        parameter.copy_(value)


@torch.no_grad()
def initialise_parts(host: nn.Module, seed: int) -> None:
    """Sets the parameters of our modules inside a model of another library, and no others.

    Call it last if the host initialises all linear maps in itself. Values depend on the full name in the host.

    Example:
        >>> from twoaxis.sequence import ShortSWA, ShortSWAConfig
        >>> host = nn.Sequential(nn.Linear(4, 4), ShortSWA(ShortSWAConfig(n_heads=2, output_init="zero"), d_model=4))
        >>> initialise_parts(host, seed=0)
        >>> host[1].output.weight.abs().max().item()
        0.0
    """
    for name, declaration in _declared(host).items():
        parameter = host.get_parameter(name)
        parameter.copy_(_initial_value(declaration.init, name, seed, parameter.shape))


def initial_values(model: nn.Module, seed: int) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yields every declared parameter with its initial value for this seed, on the CPU."""
    for name, parameter, declaration in declarations(model):
        yield parameter, _initial_value(declaration.init, name, seed, parameter.shape)


def _initial_value(init: Init, name: str, seed: int, shape: torch.Size) -> Tensor:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    with torch.device("cpu"):
        return _draw(init, shape, generator)


def _draw(init: Init, shape: torch.Size, generator: torch.Generator | None = None) -> Tensor:
    """A value on torch's default device, by default from its default generator."""
    if isinstance(init, Constant):
        return torch.full(shape, init.value)
    if isinstance(init, Values):
        return torch.tensor(init.values).reshape(shape)
    if isinstance(init, Striped):
        row, column = (torch.arange(n) % init.period for n in shape)
        return (row[:, None] == column) * init.value
    fresh = torch.empty(shape)
    if isinstance(init, UniformPairs):
        first = torch.rand(shape[:-1], generator=generator)
        return torch.stack((first, 1 - first), dim=-1)
    # Logarithms in float64: those in float32 differ between CPUs in the last place.
    if isinstance(init, LogOfUniform):
        return fresh.uniform_(init.low, init.high, generator=generator).double().log().to(fresh.dtype)
    if isinstance(init, SoftplusInverse):
        step = fresh.uniform_(math.log(init.low), math.log(init.high), generator=generator).double().exp()
        return (step + (-torch.expm1(-step)).log()).to(fresh.dtype)
    if isinstance(init, UniformBetween):
        return fresh.uniform_(init.low, init.high, generator=generator)
    if isinstance(init, Uniform):
        return fresh.uniform_(-init.bound, init.bound, generator=generator)
    drawn = fresh.normal_(0.0, init.std, generator=generator)
    if isinstance(init, NormalRows):
        drawn[shape[0] - init.last_rows :] *= init.last_std / init.std
    return drawn
