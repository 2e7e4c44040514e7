"""`python docs/kept_reports.py`: writes the data file with which the package cites the studies of this repository.

Single runs, timings and audits stay in the reports; the basis of a verdict is copied unchanged, under the same keys.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
WRITTEN = ROOT / "src" / "twoaxis" / "core" / "kept_reports.json"

REPORT_KEYS = (
    *("version", "made", "question", "answer", "complete", "design", "command", "decision_rule", "charge", "gate", "contrasts"),
    *("tuning", "overturn", "limits"),
)
ARM_KEYS = (
    *("role", "control", "why", "to", "changes", "replicates", "replicates_planned", "losses", "mean_loss", "accuracies"),
    *("steps", "tokens", "lr", "parameters", "training_flops_per_token", "verdict", "no_verdict", "sentence", "speedup"),
)


def main() -> int:
    """Writes the file."""
    WRITTEN.write_text(text(), encoding="utf-8")
    return 0


def text() -> str:
    """The data file: one report a line, so that a change of one study is a change of one line."""
    return "[\n" + ",\n".join(json.dumps(each, ensure_ascii=False) for each in entries()) + "\n]\n"


def entries(studies: Path = ROOT / "studies") -> Iterator[dict[str, Any]]:
    """What is kept of every report below `results` and `superseded`."""
    found = [("current", path) for path in sorted((studies / "results").glob("*/report.json"))]
    found += [("superseded", path) for path in sorted((studies / "superseded").rglob("*.json"))]
    for status, path in found:
        report = json.loads(path.read_text(encoding="utf-8"))
        if "arms" in report and "question" in report:
            name = path.parent.name if path.name == "report.json" else path.stem
            yield {"name": name, "status": status, "path": path.relative_to(studies.parent).as_posix(), "report": kept(report)}


def kept(report: dict[str, Any]) -> dict[str, Any]:
    """The part of a report that is kept."""
    charge = report.get("charge", "tokens")
    models = {run["arm"]: run["recipe"]["model"] for run in report.get("runs", ()) if "model" in run.get("recipe", {})}
    arms = {}
    for name, arm in report["arms"].items():
        arms[name] = _some(arm, ARM_KEYS)
        if name in models:
            arms[name] |= {"depth": models[name]["depth"], "mixers": mixers(models[name])}
        if found := arm.get("charged", {}).get(charge):
            arms[name]["charged"] = {charge: found}
    return _some(report, REPORT_KEYS) | {"arms": arms}


def mixers(model: Mapping[str, Any]) -> dict[str, int]:
    """In how many sublayers each mixer stands, and each local mixer inside one as `attention+canon`."""
    found: Counter[str] = Counter()
    blocks = model["blocks"] * (model["n_layers"] if len(model["blocks"]) == 1 else 1)
    for sublayer in (sublayer for block in blocks for sublayer in block):
        found[sublayer["kind"]] += 1
        found.update({f"{sublayer['kind']}+{part['kind']}" for part in sublayer.values() if isinstance(part, dict)})
    return dict(found)


def _some(data: dict[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: data[key] for key in keys if key in data}


if __name__ == "__main__":
    sys.exit(main())
