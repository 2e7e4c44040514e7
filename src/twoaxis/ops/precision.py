"""The precision of statistics: float32, or float64 for float64 models, also under autocast."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor

from twoaxis.core.errors import ConfigError, nearest, problem

Impl = Literal["fused", "reference"]
"""The engine that computes an operator; the result is the same, and no engine replaces another silently.

`fused` has hand-written backward passes and, where there are some, the kernels of `ops.gpu` or of `ops.cpu`; the environment of
a run says whether they were on.
"""

ISOLATED: dict[str, Any] = {"isolate_recompiles": True}
"""Gives each call of `torch.compile` its own recompile limit; not yet in the type stubs of torch."""

P = ParamSpec("P")
R = TypeVar("R")


def statistics_dtype(x: Tensor) -> torch.dtype:
    """Returns float64 for float64 tensors, float32 for every other floating-point tensor."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def outside_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """Runs an operator with autocast off, so that it alone decides its precision."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        device = _device_type(args)
        if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
            return function(*args, **kwargs)
        with torch.autocast(device, enabled=False):
            return function(*args, **kwargs)

    return run


def check_impl(impl: str) -> None:
    """Rejects an unknown engine.

    Raises:
        ConfigError: an engine that is neither `fused` nor `reference`.
    """
    if impl not in ("fused", "reference"):
        raise ConfigError(f"unknown impl {impl!r}; {nearest(impl, ('fused', 'reference'))}")


_PLAIN: ContextVar[bool] = ContextVar("_PLAIN", default=False)


@contextmanager
def plain_forms() -> Iterator[None]:
    """Lets operators run within the block, in this thread, as under `torch.compile`, and without kernels."""
    token = _PLAIN.set(True)
    try:
        yield
    finally:
        _PLAIN.reset(token)


def runs_plain(impl: str) -> bool:
    """Whether an operator runs in its plain form: as the reference, and under `torch.compile`, which fuses it.

    Operators with kernels ask for them first, since these run under `torch.compile` too.

    Raises:
        ConfigError: an engine that is neither `fused` nor `reference`.
    """
    check_impl(impl)
    return impl == "reference" or torch.compiler.is_compiling() or _PLAIN.get()


def within_plain_forms() -> bool:
    """Whether the caller asked for plain forms, which a compiler does not: it calls kernels."""
    return not torch.compiler.is_compiling() and _PLAIN.get()


BY_REFERENCE = "pass impl='reference'"
"""A remedy where the caller chooses the engine."""

IN_PLAIN_FORMS = "run the model within twoaxis.ops.precision.plain_forms()"
"""A remedy where the caller does not; attention and the loss stay fused there, as they do under `torch.compile`."""


def refuse_second_gradients(operator: str, remedy: str = f"{BY_REFERENCE}, or {IN_PLAIN_FORMS}") -> None:
    """Refuses gradients of gradients: begins each backward pass that autograd would differentiate wrongly.

    Autograd takes for constants what a forward pass saves beside its inputs and outputs, such as norms and scores, and it does
    not see what kernels compute. In a backward pass, grad mode is on with `create_graph=True` alone: recomputation, and a
    caller's own `enable_grad`, leave it off.

    Raises:
        ConfigError: the backward pass is to be differentiated.
    """
    if torch.is_grad_enabled():
        raise ConfigError(problem("create_graph", True, f"False, since {operator} has first gradients alone", remedy))


def _device_type(args: tuple[object, ...]) -> str:
    for value in args:
        if isinstance(value, Tensor):
            return value.device.type
        if isinstance(value, tuple | list) and value and isinstance(value[0], Tensor):
            return value[0].device.type
    return "cpu"
