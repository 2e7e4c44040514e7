"""Starts the processes of a distributed test, and leaves none behind."""

import gc
import importlib.util
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any


def run_processes(script: Path, folder: Path, ranks: int, timeout_seconds: float) -> None:
    """Calls `main(folder, rank, ranks)` of a script in a process for every rank.

    The processes are forks of one that has imported the script, and called its `prepare(folder)` if it has one. When one
    fails or hangs, all end, and this fails with what they said.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    logs = [folder / f"rank{rank}.log" for rank in range(ranks)]
    command = [sys.executable, str(Path(__file__)), str(script), str(folder), str(ranks)]
    with (folder / "ranks.log").open("wb") as said:
        first = subprocess.Popen(command, env=environment, stdout=said, stderr=said, start_new_session=True)
    try:
        status = first.wait(timeout_seconds)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"after {timeout_seconds} s a process still ran\n{_tails(logs)}") from None
    finally:
        # It ends the others.
        first.terminate()
        first.wait()
    assert status == 0, _tails([folder / "ranks.log", *logs])


def _tails(logs: list[Path]) -> str:
    return "\n".join(f"{log.name}: {log.read_text()[-3000:]}" for log in logs if log.exists())


def _fork(script: Path, folder: Path, ranks: int) -> int:
    spec = importlib.util.spec_from_file_location(script.stem, script)
    assert spec and spec.loader
    worker = sys.modules[script.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(worker)
    if "torch" in sys.modules:
        # Any optimizer, recomputation or pass without memory would import it in every rank.
        importlib.import_module("torch._dynamo")
        # Else each rank would load the kernels, and compile them into a cache folder of its own.
        importlib.import_module("twoaxis.ops.cpu.library").status()
    if prepare := getattr(worker, "prepare", None):
        prepare(folder)
    # Collections of a rank need not walk through what was imported, and are rarer.
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)
    processes = set[int]()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))
    try:
        for rank in range(ranks):
            if not (process := os.fork()):
                _run(worker, folder, rank, ranks)
            processes.add(process)
        while processes:
            process, status = os.wait()
            processes.remove(process)
            if status:
                return 1
        return 0
    finally:
        for process in processes:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)


def _run(worker: Any, folder: Path, rank: int, ranks: int) -> None:
    """Ends without the end of the interpreter, which tears gloo's threads down and has aborted once all was done."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    status = 1
    try:
        worker.main(folder, rank, ranks)
        status = 0
    except BaseException:  # What a test says of its end, whatever it is.
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    sys.exit(_fork(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])))
