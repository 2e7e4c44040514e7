"""Acting when another library is imported, without importing it."""

import importlib
import importlib.machinery
import sys
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any


def when_imported(module: str, action: str) -> None:
    """Calls a function right after a module has run for the first time: now, if it has.

    Args:
        module: the full name of a module.
        action: `module:function`, imported only then.

    Example:
        >>> when_imported("colorsys", "gc:collect")
    """
    if module in sys.modules:
        _call(action)
    else:
        sys.meta_path.insert(0, _Hook(module, action))


class _Hook(MetaPathFinder):
    """Finds one module as Python itself would."""

    def __init__(self, module: str, action: str) -> None:
        self.module, self.action = module, action

    # Python passes paths that are no sequences, whatever its own annotation says.
    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        if name != self.module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_act(module: ModuleType) -> None:
                run(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    _call(self.action)

            spec.loader.exec_module = run_and_act
        return spec


def _call(action: str) -> None:
    module, _, function = action.partition(":")
    getattr(importlib.import_module(module), function)()
