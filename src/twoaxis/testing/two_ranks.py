"""Two processes that measure a mixer together: the first check starts them, and they end with this process.

A question is one line of JSON: a function of a module, the class and the data of a configuration, and other arguments. An
answer is an error message or tensors by name in the format of safetensors, with a byte for its kind and its length before it.
"""

import atexit
import gc
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from functools import cache, reduce
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor

from twoaxis.testing.conformance import CheckFailed
from twoaxis.testing.toy import AxisConfig

RANKS = 2
WAIT_SECONDS = 60

LOSS = "loss"
"""The name of the loss among the gradients, which have the names of parameters."""

Measure = Callable[..., dict[str, Tensor]]
"""Called with a mesh of all ranks, the rank, the configuration and other arguments."""


def ask_ranks(measure: Measure, config: AxisConfig, *given: Any) -> list[dict[str, Tensor]]:
    """What a function of a module measures on every rank; other arguments are JSON.

    Raises:
        CheckFailed: an error on a rank, or a configuration whose class cannot be imported there.
    """
    question = {"measure": _name(measure), "config": _name(type(config)), "data": config.to_data(), "given": given}
    return _ranks().measure(json.dumps(question).encode() + b"\n")


class _Ranks:
    """The processes."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="twoaxis-ranks-")
        meeting = str(Path(self._folder.name) / "meeting")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-c", "from twoaxis.testing.two_ranks import _serve; _serve()", meeting, str(rank)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
            )
            for rank in range(RANKS)
        ]

    def measure(self, question: bytes) -> list[dict[str, Tensor]]:
        """The answer of each rank."""
        try:
            for process in self._processes:
                assert process.stdin is not None
                process.stdin.write(question)
                process.stdin.flush()
            answers = [_read(process.stdout) for process in self._processes if process.stdout is not None]
        except (OSError, EOFError) as error:
            _ranks.cache_clear()
            self.end()
            raise CheckFailed(f"the ranks have ended ({type(error).__name__}: {error}); their own output says why") from None
        for answer in answers:
            if isinstance(answer, str):
                # The other rank may wait for this one, and would answer the next question with the rest of this.
                _ranks.cache_clear()
                self.end()
                raise CheckFailed(answer)
        return [answer for answer in answers if not isinstance(answer, str)]

    def end(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                stream.close()
        self._folder.cleanup()


@cache
def _ranks() -> _Ranks:
    ranks = _Ranks()
    atexit.register(ranks.end)
    return ranks


def _serve() -> None:
    """Answers questions until there are no more."""
    meeting, rank = sys.argv[1], int(sys.argv[2])
    answers, sys.stdout = os.fdopen(os.dup(sys.stdout.fileno()), "wb"), sys.stderr
    torch.set_num_threads(1)
    store = dist.FileStore(meeting, RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=WAIT_SECONDS))
    mesh = dist.init_device_mesh("cpu", (RANKS,))
    # Sharding and recomputation would import it later; no search for garbage walks through what was imported.
    importlib.import_module("torch._dynamo")
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)
    for line in sys.stdin.buffer:
        question = json.loads(line)
        try:
            config = _named(question["config"]).from_data(question["data"])
            found = _named(question["measure"])(mesh, rank, config, *question["given"])
            _write(answers, b"T", save({name: tensor.contiguous() for name, tensor in found.items()}))
        except Exception as error:
            _write(answers, b"E", f"{type(error).__name__} on rank {rank}: {' '.join(str(error).split())}".encode())
    os._exit(0)


def _name(thing: Any) -> str:
    return f"{thing.__module__}:{thing.__qualname__}"


def _named(name: str) -> Any:
    module, _, path = name.partition(":")
    return reduce(getattr, path.split("."), importlib.import_module(module))


def _write(stream: BinaryIO, kind: bytes, content: bytes) -> None:
    stream.write(kind + len(content).to_bytes(8, "little") + content)
    stream.flush()


def _read(stream: Any) -> str | dict[str, Tensor]:
    head = stream.read(9)
    if len(head) < 9:
        raise EOFError("no answer")
    content = stream.read(int.from_bytes(head[1:], "little"))
    return load(content) if head[:1] == b"T" else content.decode()
