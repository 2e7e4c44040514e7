"""Scripts of `docs`, `benchmarks` and `examples`, as modules, and what those of `docs` write."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def load_script(path: Path) -> ModuleType:
    """Runs a script that no package holds, and returns what it defines."""
    name = f"script_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def printed(module: str, expression: str) -> str:
    """What an expression over a module of docs gives, in a process without run-time types, which take far longer."""
    command = [sys.executable, "-c", f"import json; from {module} import *; print({expression}, end='')"]
    return subprocess.run(command, cwd=DOCS, stdout=subprocess.PIPE, text=True, check=True, encoding="utf-8").stdout
