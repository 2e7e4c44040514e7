"""Runs Python code as a fresh process would, in a fork of one that has loaded torch and nothing of ours.

Loading torch takes longer than what most of these tests look at. The process is started with the first of them, in every
worker of a session, and ends with it.

As a script it reads requests, lines of JSON on standard input, and answers each with the exit status.
"""

import atexit
import gc
import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any


def run_fresh(
    code: str, *arguments: str, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs code like `python -c`, with nothing on standard input; what it printed is text."""
    with tempfile.TemporaryDirectory(prefix="twoaxis-fresh-") as name:
        out, err = Path(name) / "out", Path(name) / "err"
        environment, where = dict(os.environ if env is None else env), str(cwd or Path.cwd())
        request = {"code": code, "arguments": arguments, "out": str(out), "err": str(err), "cwd": where, "env": environment}
        server = _server()
        assert server.stdin and server.stdout
        print(json.dumps(request), file=server.stdin, flush=True)
        status = int(server.stdout.readline())
        return subprocess.CompletedProcess(code, status, out.read_text(), err.read_text())


@cache
def _server() -> subprocess.Popen[str]:
    server = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    # It ends with its standard input.
    atexit.register(server.communicate)
    return server


def _become(request: Mapping[str, Any]) -> None:
    """Makes this process one that runs the code, and ends it."""
    status = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, path in ((1, request["out"]), (2, request["err"])):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
        os.environ.clear()
        os.environ.update(request["env"])
        os.chdir(request["cwd"])
        # As `python -c` has it, without the folder of this file.
        sys.argv, sys.path[0] = ["-c", *request["arguments"]], ""
        status = _run(request["code"])
    except BaseException:  # As an interpreter would show it.
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _run(code: str) -> int:
    try:
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(code, "<string>", "exec"), main.__dict__)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(bool(end.code))
    return 0


def _serve() -> None:
    importlib.import_module("torch")
    gc.freeze()
    for line in sys.stdin:
        if not (process := os.fork()):
            _become(json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)


if __name__ == "__main__":
    _serve()
