"""Which calls are checked at run time: of functions whose tensors have declared shapes, once for every kind of arguments."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jaxtyping
from torch import Tensor, nn

_check: Any = jaxtyping.jaxtyped
_FINDERS: dict[type, Callable[[Any, bool], Any]] = {}
_MODULES: dict[Any, int] = {}
_KIND = "_kind_of_shapes"
"""Where a module keeps its kind, which is slow to find."""


def checked_if_of_shapes(declared: Any = None, **options: Any) -> Any:
    """Stands for `jaxtyping.jaxtyped`, and checks only functions and dataclasses that declare the shape of a tensor.

    All other types are for the type checker. A call with arguments of a kind that passed before is not checked again.
    """
    if declared is None:
        return functools.partial(checked_if_of_shapes, **options)
    if "[Tensor" not in str(getattr(inspect.unwrap(declared), "__annotations__", "")):
        return declared
    if not inspect.isclass(declared):
        return _once_per_kind(declared, lambda: _check(declared, **options))
    plain = declared.__init__
    checked = _check(declared, **options).__init__
    if checked is not plain:
        # Before `__init__` the object itself has nothing yet that could be looked at.
        declared.__init__ = _once_per_kind(plain, lambda: checked, skipped=1)
    return declared


def _once_per_kind(plain: Callable[..., Any], check: Callable[[], Callable[..., Any]], skipped: int = 0) -> Callable[..., Any]:
    checked: Callable[..., Any] | None = None
    passed: set[Any] = set()

    @functools.wraps(plain)
    def called(*args: Any, **named: Any) -> Any:
        nonlocal checked
        kinds = tuple(map(kind, args[skipped:] if skipped else args))
        if named:
            kinds += tuple(named), *map(kind, named.values())
        if kinds in passed:
            return plain(*args, **named)
        # Made at the first call, when all annotations can be resolved; most functions are called by few tests.
        checked = checked or check()
        result = checked(*args, **named)
        passed.add(kinds)
        return result

    return called


def kind(value: Any, numbers: bool = True) -> Any:
    """What shapes can depend on: two arguments of one kind pass or fail a check together.

    Numbers inside other objects are left out: there they count tokens, which differ at every step of generation.
    """
    of_type = type(value)
    if of_type is Tensor or of_type is nn.Parameter:
        return value.shape, value.dtype
    find = _FINDERS.get(of_type) or _FINDERS.setdefault(of_type, _finder(of_type))
    return find(value, numbers)


def _finder(of_type: type) -> Callable[[Any, bool], Any]:
    """How the kind of a value of this type is found."""
    if of_type in (int, bool, str):
        return lambda value, numbers: value if numbers else of_type
    if of_type is tuple or of_type is list:
        return lambda value, numbers: (of_type, *[kind(entry, numbers) for entry in value])
    if issubclass(of_type, nn.Module):
        return lambda value, numbers: value.__dict__.get(_KIND) or value.__dict__.setdefault(_KIND, _kind_of_module(value))
    if issubclass(of_type, Tensor):
        return lambda value, numbers: (of_type, value.shape, value.dtype)
    if issubclass(of_type, dict):
        return lambda value, numbers: (of_type, *[(key, kind(entry, numbers)) for key, entry in value.items()])
    if dataclasses.is_dataclass(of_type):
        names = tuple(field.name for field in dataclasses.fields(of_type))
        return lambda value, numbers: (of_type, *[kind(getattr(value, name), False) for name in names])
    return lambda value, numbers: of_type


def _kind_of_module(module: nn.Module) -> tuple[type, int]:
    """A number for all that are alike: what it stands for takes long to compare."""
    settings = tuple((name, value) for name, value in vars(module).items() if isinstance(value, int | float | str))
    alike = type(module), settings, tuple(p.shape for p in module.parameters())
    return nn.Module, _MODULES.setdefault(alike, len(_MODULES))
