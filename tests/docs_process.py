"""Runs what writes the pages of docs."""

import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def printed(module: str, expression: str) -> str:
    """What an expression over a module of docs gives, in a process without run-time types, which take far longer."""
    command = [sys.executable, "-c", f"import json; from {module} import *; print({expression}, end='')"]
    return subprocess.run(command, cwd=DOCS, stdout=subprocess.PIPE, text=True, check=True, encoding="utf-8").stdout
