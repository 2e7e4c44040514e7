"""Processes of a distributed test that fail or hang end with it."""

import os
from pathlib import Path

import pytest

from .processes import run_processes

WORKER = """
import os, sys, time

def main(folder, rank, ranks):
    (folder / f"pid{rank}").write_text(str(os.getpid()))
    """


@pytest.mark.parametrize(
    ("end", "timeout_seconds", "said"),
    [
        ("time.sleep(1000)", 3.0, "a process still ran"),
        ("sys.exit('lost') if rank == 1 else time.sleep(1000)", 60.0, "lost"),
    ],
)
def test_no_process_is_left_behind(end: str, timeout_seconds: float, said: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(WORKER + end)
    with pytest.raises((AssertionError, TimeoutError), match=said):
        run_processes(script, tmp_path, 2, timeout_seconds)
    for pid in tmp_path.glob("pid*"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid.read_text()), 0)
