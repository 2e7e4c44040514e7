"""A short study through the command line: every part of a study meets the device once; its losses mean nothing."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.gpu.settings import Row, Settings
from benchmarks.gpu.worker import ItemFailed
from twoaxis.study.running.engine import log_tail, run_process

ROOT = Path(__file__).parents[2]
STUDY = ROOT / "studies" / "gpu" / "shortcut.toml"

SHORT = (
    "replicates=2",
    "contrasts=[]",
    "tuning={lr=[1e-3, 2e-3], tokens=20000, widen=0}",
    "budget={steps=40}",
    "base.batch_size=32",
    "base.validate_every=40",
    "base.checkpoint_every=40",
    "base.compile=off",
    "base.data.tokenizer=byte",
    'arms={residual={}, deep_delta={model={depth="deep_delta"}}}',
)
"""Two arms, two rates, two seeds, a few steps; no tokenizer is trained and no block compiled, which would take longer."""

TINY = (
    "budget.steps=2",
    "base.batch_size=2",
    "base.micro_batch_size=2",
    "base.data.seq_len=16",
    "base.model.d_model=16",
    "base.model.n_layers=1",
    'base.model.blocks=[[{kind="attention", n_heads=2}, "swiglu"]]',
    "base.validation_tokens=64",
)
"""What else is cut for the small size."""


def command(settings: Settings, out: Path) -> list[str]:
    """The command line of the study."""
    overrides = [*SHORT, *settings.pick((), TINY), f"base.device={settings.device}"]
    return [sys.executable, "-m", "twoaxis", "study", str(STUDY), *overrides, "--out", str(out)]


def run(
    settings: Settings, out: Path, limit_seconds: float, command: Callable[[Settings, Path], list[str]] = command
) -> list[Row]:
    """Runs the study and reads its report; one that takes too long is asked to stop.

    Args:
        settings: device and size.
        out: folder of the study.
        limit_seconds: for the whole of it.
        command: makes the command line.

    Raises:
        ItemFailed: it took too long or failed, with its last words.
    """
    until = time.monotonic() + limit_seconds
    log = out.with_suffix(".log")

    def watch() -> None:
        if time.monotonic() > until:
            raise TimeoutError

    try:
        code = run_process(command(settings, out), log, watch)
    except TimeoutError:
        raise ItemFailed(f"took more than {limit_seconds:.0f} s and was stopped; {log_tail(log, 0)}") from None
    if code != 0 or not (out / "report.json").exists():
        raise ItemFailed(log_tail(log, code))
    return rows(out)


def rows(out: Path) -> list[Row]:
    """One row per arm of a finished study."""
    arms = json.loads((out / "report.json").read_text(encoding="utf-8"))["arms"]
    return [
        {
            "arm": name,
            "runs": arm["replicates"],
            "validation loss": arm["mean_loss"],
            "tokens/s": arm["tokens_per_second"],
            "step s to control": arm["step_seconds_ratio"],
            "verdict": "control" if arm["control"] else arm["verdict"] or arm["no_verdict"],
            "ok": arm["mean_loss"] is not None,
        }
        for name, arm in arms.items()
    ]
