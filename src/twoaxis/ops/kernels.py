"""What the kernels of all devices share: their switch, their operators in torch's library, and tensors as they take them."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from twoaxis.core.errors import ConfigError, problem

SWITCH = "TWOAXIS_KERNELS"
"""Environment variable: `on` (the default) or `off`; it is read when the package is imported."""

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton interprets its kernels, which then serve tensors of the CPU."""

KERNEL_DEVICES = ("CUDA", "CPU") if INTERPRETED else ("CUDA",)

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def _switched_on() -> bool:
    chosen = os.environ.get(SWITCH, "on")
    if chosen not in ("on", "off"):
        raise ConfigError(problem(SWITCH, chosen, "'on' or 'off'", "change the environment variable"))
    return chosen == "on"


class _State:
    """Whether kernels run; an attribute, so that `torch.compile` guards on it."""

    on = _switched_on()


def switched_on() -> bool:
    """Whether kernels may run, on any device."""
    return _State.on


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """Runs the torch engine within the block, in all threads of this process."""
    before, _State.on = _State.on, False
    try:
        yield
    finally:
        _State.on = before


def watched() -> bool:
    """Whether something watches PyTorch's operations, and would take what kernels compute for constants."""
    return torch._C._are_functorch_transforms_active() or torch.jit.is_tracing() or forward_ad._current_level >= 0


LIBRARY = torch.library.Library("twoaxis", "FRAGMENT")


def operator(schema: str, fake: Callable[..., Any], devices: Sequence[str] = KERNEL_DEVICES) -> Callable[[F], F]:
    """Registers the function that it decorates as `torch.ops.twoaxis.NAME`, opaque to `torch.compile`.

    Args:
        schema: name, arguments and results in torch's notation; no result may be an argument.
        fake: makes the results from shapes alone.
        devices: that it serves, as torch's dispatcher calls them.
    """
    name = schema.partition("(")[0]

    def register(implementation: F) -> F:
        LIBRARY.define(schema)
        for device in devices:
            LIBRARY.impl(name, implementation, device)
        torch.library.register_fake(f"twoaxis::{name}", fake, lib=LIBRARY)
        return implementation

    return register


def empty(x: Tensor) -> Tensor:
    """Returns a contiguous tensor of the same shape, dtype and device, for a kernel to fill."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def materialised(x: Tensor) -> Tensor:
    """Returns the tensor with its numbers in memory: a gradient may be zeros without memory, or wait to be negated."""
    return x.clone() if x._is_zerotensor() else x.resolve_neg()


def ready(x: Tensor) -> Tensor:
    """Returns the tensor, or a copy where it is not contiguous or its address is no multiple of 16 bytes.

    Kernels take rows as they lie in memory and load 16 bytes at a time.
    """
    x = materialised(x)
    if x.is_contiguous() and (INTERPRETED or x.data_ptr() % 16 == 0):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def distinct(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The tensors; traced, each is a view of its own, since Dynamo refuses a function that is given the same tensor twice."""
    return [x.view_as(x) for x in tensors] if torch.compiler.is_compiling() else tensors


def spread(tensors: Sequence[Tensor], places: int, fillers: Sequence[T]) -> list[Tensor | T]:
    """Returns the tensors at the positions of a set, and the fillers elsewhere."""
    found = iter(tensors)
    return [next(found) if places >> index & 1 else filler for index, filler in enumerate(fillers)]


def bits(chosen: Sequence[bool]) -> int:
    """Returns a set of positions as the bits of one number.

    Example:
        >>> bits([True, False, True])
        5
    """
    return sum(1 << index for index, one in enumerate(chosen) if one)
