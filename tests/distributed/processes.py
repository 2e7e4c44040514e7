"""Starts the processes of a distributed test, and leaves none behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def run_processes(script: Path, folder: Path, ranks: int, timeout_seconds: float) -> None:
    """Runs `script FOLDER RANK RANKS` for every rank; when one fails or hangs, ends all and fails with what they said."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    logs = [folder / f"rank{rank}.log" for rank in range(ranks)]
    processes = []
    try:
        for rank, log in enumerate(logs):
            command = [sys.executable, str(script), str(folder), str(rank), str(ranks)]
            with log.open("wb") as said:
                processes.append(subprocess.Popen(command, env=environment, stdout=said, stderr=said, start_new_session=True))
        deadline = time.monotonic() + timeout_seconds
        while any(process.poll() is None for process in processes):
            if time.monotonic() > deadline:
                raise TimeoutError(f"after {timeout_seconds} s a process still ran\n{_tails(logs)}")
            if any(process.poll() for process in processes):
                break
            time.sleep(0.1)
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    assert [process.returncode for process in processes] == [0] * ranks, _tails(logs)


def _tails(logs: list[Path]) -> str:
    return "\n".join(f"{log.name}: {log.read_text()[-3000:]}" for log in logs if log.exists())
