"""Which calls are checked at run time: of functions whose tensors have declared shapes, once for every kind of arguments."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import jaxtyping
from torch import Tensor, nn

_check: Any = jaxtyping.jaxtyped
_checking = True
_FINDERS: dict[type, Callable[[Any, bool, list[Any]], None] | None] = {}
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


def check_shapes(wanted: bool) -> None:
    """Checks calls from now on, or runs them as they are: to look at each takes an eighth of the time of a test."""
    global _checking
    _checking = wanted


def _once_per_kind(plain: Callable[..., Any], check: Callable[[], Callable[..., Any]], skipped: int = 0) -> Callable[..., Any]:
    checked: Callable[..., Any] | None = None
    passed: set[Any] = set()

    @functools.wraps(plain)
    def called(*args: Any, **named: Any) -> Any:
        nonlocal checked
        if not _checking:
            return plain(*args, **named)
        found: list[Any] = []
        _add_kinds(args[skipped:] if skipped else args, True, found)
        if named:
            found.append(tuple(named))
            _add_kinds(named.values(), True, found)
        kinds = tuple(found)
        if kinds in passed:
            return plain(*args, **named)
        # Made at the first call, when all annotations can be resolved; most functions are called by few tests.
        checked = checked or check()
        result = checked(*args, **named)
        passed.add(kinds)
        return result

    return called


def _add_kinds(values: Iterable[Any], numbers: bool, found: list[Any]) -> None:
    """Adds what shapes can depend on: arguments of equal kinds pass or fail a check together.

    All in one list and one loop, for every call of every function is looked at. Numbers inside other objects are left out:
    there they count tokens, which differ at every step of generation.
    """
    for value in values:
        of_type = type(value)
        if of_type is Tensor or of_type is nn.Parameter:
            found.append(value.shape)
            found.append(value.dtype)
        elif of_type is int or of_type is bool or of_type is str:
            found.append(value if numbers else of_type)
        elif of_type is tuple or of_type is list:
            found.append((of_type, len(value)))
            _add_kinds(value, numbers, found)
        else:
            add = _FINDERS[of_type] if of_type in _FINDERS else _FINDERS.setdefault(of_type, _finder(of_type))
            if add is None:
                found.append(of_type)
            else:
                add(value, numbers, found)


def _finder(of_type: type) -> Callable[[Any, bool, list[Any]], None] | None:
    """How the kind of a value of this type is added; None where it is the type."""
    if issubclass(of_type, nn.Module):
        return lambda value, numbers, found: found.append(value.__dict__.get(_KIND) or _kind_of_module(value))
    if issubclass(of_type, Tensor):
        return lambda value, numbers, found: found.extend((of_type, value.shape, value.dtype))
    if issubclass(of_type, dict):

        def add_dict(value: Any, numbers: bool, found: list[Any]) -> None:
            found.append((of_type, *value))
            _add_kinds(value.values(), numbers, found)

        return add_dict
    if dataclasses.is_dataclass(of_type):
        names = tuple(field.name for field in dataclasses.fields(of_type))

        def add_fields(value: Any, numbers: bool, found: list[Any]) -> None:
            found.append(of_type)
            _add_kinds([getattr(value, name) for name in names], False, found)

        return add_fields
    return None


def _kind_of_module(module: nn.Module) -> tuple[type, int]:
    """A number for all that are alike: what it stands for takes long to compare."""
    settings = tuple((name, value) for name, value in vars(module).items() if isinstance(value, int | float | str))
    alike = type(module), settings, tuple(p.shape for p in module.parameters())
    return module.__dict__.setdefault(_KIND, (nn.Module, _MODULES.setdefault(alike, len(_MODULES))))
