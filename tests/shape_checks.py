"""Which functions are checked at run time: those that take or return tensors, whose shapes no type checker knows."""

import functools
import inspect
from typing import Any

import jaxtyping

_check: Any = jaxtyping.jaxtyped


def checked_if_of_tensors(declared: Any = None, **options: Any) -> Any:
    """Stands for `jaxtyping.jaxtyped`, and leaves functions of other things alone: they would take most of the time."""
    if declared is None:
        return functools.partial(checked_if_of_tensors, **options)
    function = declared.fget if isinstance(declared, property) else inspect.unwrap(getattr(declared, "__func__", declared))
    return _check(declared, **options) if "Tensor" in str(getattr(function, "__annotations__", "")) else declared
