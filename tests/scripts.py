"""Scripts of `docs`, `benchmarks` and `examples`, as modules, and what those of `docs` write."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from .made_once import made_once

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


PAGES = """import json
from contextlib import redirect_stdout
from io import StringIO
from build import claims_page, design_page
from planner.published.page import published, published_page
from twoaxis.cli import main

with redirect_stdout(StringIO()) as listed:
    assert main(["list", "--design", "--json"]) == 0
rows = [(row.holds, row.why) for paper in published() for row in paper.rows]
pages = {"design": design_page(), "claims": claims_page(), "published": published_page("published.svg")}
pages |= {"list --design --json": listed.getvalue(), "rows": rows, "remarks": [paper.remarks for paper in published()]}
print(json.dumps(pages))
"""


def computed_pages(temporary: pytest.TempPathFactory) -> dict[str, Any]:
    """The pages of methods, claims and published numbers as computed now, and what they are made of.

    One process makes them for all tests, without run-time types, which take far longer.
    """

    def make(folder: Path) -> None:
        with open(folder / "pages.json", "wb") as file:
            subprocess.run([sys.executable, "-c", PAGES], cwd=DOCS, stdout=file, check=True)

    return json.loads((made_once(temporary, "pages", make) / "pages.json").read_bytes())
