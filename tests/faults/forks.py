"""Runs command lines in forks of one process that has everything loaded, so that many can be broken off in a short time.

Usage: python forks.py, with requests as lines of JSON on standard input. Each is answered by a line with the exit status
(negative for a signal) and the number of things that were written.
"""

import contextlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from disk import Disk  # type: ignore[import-not-found]


def load() -> Callable[[Sequence[str]], int]:
    """Imports what verbs import when they are called, and returns the command line."""
    import twoaxis.audit.run
    import twoaxis.checkpoints.retrofit
    import twoaxis.cli.audit
    import twoaxis.interop.evaluate
    import twoaxis.ops.cpu.library
    import twoaxis.planner.hardware.calibrate
    import twoaxis.planner.model_plan
    import twoaxis.planner.page.document
    import twoaxis.study.report
    import twoaxis.study.running
    import twoaxis.study.running.engine
    import twoaxis.study.timing
    from twoaxis.cli import main
    from twoaxis.display.figures import Figure
    from twoaxis.planner.hardware.device import read_device

    if importlib.util.find_spec("transformers"):
        import twoaxis.interop.hugging_face
    # Else every fork compiles the kernels for a cache folder of its own.
    twoaxis.ops.cpu.library.status()
    # What takes long and writes nothing: measurements, figures, and the computation of a page.
    calibrate = twoaxis.planner.hardware.calibrate
    device = calibrate.Calibration(read_device("h100"), "bf16", (), ())
    calibrate.calibrate = lambda: device
    twoaxis.study.timing.ROUNDS = 1
    Figure.svg, Figure.png = (lambda self: "<svg></svg>"), (lambda self: b"IEND\xaeB`\x82")
    Figure.inline = lambda self, width: "<svg></svg>"
    twoaxis.planner.page.document.planner_page = lambda *_: "<html></html>\n"
    methods = twoaxis.planner.model_plan.methods_for
    twoaxis.planner.model_plan.methods_for = lambda goal: methods(goal)[:2]
    # The processes of a study run in its own, where they share its disk.
    for module in (twoaxis.study.running, twoaxis.study.running.engine):
        setattr(module, "run_process", lambda command, log, *_: run_here(main, command, log))  # noqa: B010, of two modules
    return main


def run_here(main: Callable[[Sequence[str]], int], command: Sequence[str], log: Path) -> int:
    """Stands in for `run_process`."""
    from twoaxis.study import timing

    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab"):
        pass
    if command[2] == "twoaxis":
        return main(command[3:])
    timing.main(Path(command[3]), Path(command[4]))
    return 0


def serve_one(main: Callable[[Sequence[str]], int], request: Mapping[str, Any]) -> None:
    """Runs one command line in this process, which ends."""
    for number in (1, 2):
        os.dup2(os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.environ.update(request["environment"])
    disk = Disk(request["within"], request["fault"], request["at"])
    disk.attach()
    disk.attach_to_safetensors()
    loaded = set(sys.modules)
    status = main(request["words"])
    sys.stdout.flush()
    sys.stderr.flush()
    with open(request["answers"], "w") as pipe:
        json.dump({"count": disk.count, "imported": sorted(set(sys.modules) - loaded)}, pipe)
    os._exit(status)


def serve() -> None:
    """Answers requests until there are no more."""
    main = load()
    for line in sys.stdin:
        request = json.loads(line)
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            try:
                serve_one(main, {**request, "answers": writing})
            finally:
                import traceback

                traceback.print_exc()
                os._exit(99)
        os.close(writing)
        with open(reading) as pipe:
            answer = json.loads(pipe.read() or '{"count": 0, "imported": []}')
        _, ended = os.waitpid(child, 0)
        print(json.dumps({"status": os.waitstatus_to_exitcode(ended), "count": answer["count"]}), flush=True)
        # So that the next fork need not import it again.
        for module in answer["imported"]:
            with contextlib.suppress(Exception):
                importlib.import_module(module)


if __name__ == "__main__":
    serve()
