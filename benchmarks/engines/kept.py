"""What the scripts keep: one JSON file per engine, one run a line."""

import json
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "results" / "engines"


def header(*packages: str, **facts: Any) -> dict[str, Any]:
    """The versions of these packages, the date, the kind of processor, and what else holds for every run."""
    versions = {package: version(package) for package in packages}
    return {"date": datetime.now(UTC).date().isoformat(), "versions": versions, "machine": platform.machine(), **facts}


def read(name: str) -> dict[str, Any]:
    """What is kept of an engine; nothing before its first run."""
    path = FOLDER / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"runs": []}


def write(name: str, head: dict[str, Any], runs: list[dict[str, Any]]) -> None:
    """Keeps the runs of an engine."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    lines = [f"  {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in head.items()]
    each = ",\n".join(f"    {json.dumps(run, ensure_ascii=False)}" for run in runs)
    text = "{\n" + ",\n".join([*lines, f'  "runs": [\n{each}\n  ]']) + "\n}\n"
    (FOLDER / f"{name}.json").write_text(text, encoding="utf-8")
