"""Adapters: one file per family; each runs our code on a fixture and returns every stored output and gradient."""

import importlib
import pkgutil
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import pytest
from torch import Tensor

from ..golden import Golden

Run = Callable[[Golden], Mapping[str, Tensor]]


@dataclass(frozen=True)
class Mistake:
    """A wrong variant that the comparison must refuse: which fixture shows it, and how to plant it."""

    what: str
    fixture: str
    plant: Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Adapter:
    """Claims fixtures by name.

    Attributes:
        claims: regular expressions of whole fixture names, each with what runs them.
        mistakes: planted faults, at least one for each way to run.
    """

    claims: Mapping[str, Run]
    mistakes: tuple[Mistake, ...]

    def runner(self, name: str) -> Run | None:
        """What runs the fixture of this name, or None."""
        for pattern, run in self.claims.items():
            if re.fullmatch(pattern, name):
                return run
        return None


def claimed_by(name: str) -> Run | None:
    """What runs the fixture of this name, or None when no adapter claims it."""
    runners = [adapter.runner(name) for adapter in adapters()]
    return next((run for run in runners if run is not None), None)


@cache
def adapters() -> tuple[Adapter, ...]:
    """The adapter of every file beside this one."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return tuple(importlib.import_module(f".{name}", __name__).ADAPTER for name in names)
