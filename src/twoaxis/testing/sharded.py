"""Two ranks that share out the parameters and the rows of a batch compute what one process does.

The ranks are two processes that the first check starts and that end with this one.
"""

import atexit
import json
import os
import subprocess
import sys
import tempfile
from datetime import timedelta
from functools import cache, reduce
from importlib import import_module
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor

from twoaxis.core.measure import distance
from twoaxis.model import Decoder
from twoaxis.testing.conformance import CheckFailed, bound, slow_check
from twoaxis.testing.toy import AxisConfig, decoder_config, toy_decoder, toy_tokens

RANKS = 2
WAIT_SECONDS = 60


@slow_check
def sharded_equals_whole(config: AxisConfig) -> None:
    """Loss and all gradients of two ranks with half of each parameter are those of one process."""
    model = toy_decoder(config, dtype=torch.float32)
    loss = _loss(model, toy_tokens(2 * RANKS))
    loss.backward()
    found, gradients = _ranks().measure(config)
    away = abs(found - loss.item()) / abs(loss.item())
    if away > bound("sharded_loss"):
        raise CheckFailed(f"loss of {RANKS} ranks: {found!r}, must be {loss.item()!r} within {bound('sharded_loss'):.0e}")
    limit = bound("sharded_gradients")
    for name, parameter in model.named_parameters():
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        size = max(1.0, float(expected.abs().max()))
        if (away := distance(gradients.get(name, torch.zeros_like(expected)), expected) / size) > limit:
            raise CheckFailed(
                f"gradient of {name} on {RANKS} ranks: differs by {away:.1e} of its size, must be within {limit:.0e}"
            )


def _loss(model: Decoder, tokens: Tensor) -> Tensor:
    total, _ = model.loss(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    return total / (toy_tokens(2 * RANKS).numel() - 2 * RANKS)


class _Ranks:
    """The processes; each reads configurations from its input and writes what it measures."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="twoaxis-ranks-")
        meeting = str(Path(self._folder.name) / "meeting")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-c", "from twoaxis.testing.sharded import _serve; _serve()", meeting, str(rank)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
            )
            for rank in range(RANKS)
        ]

    def measure(self, config: AxisConfig) -> tuple[float, dict[str, Tensor]]:
        """The loss of all ranks, and every whole gradient by name."""
        question = {"module": type(config).__module__, "name": type(config).__qualname__, "data": config.to_data()}
        try:
            for process in self._processes:
                assert process.stdin is not None
                process.stdin.write(json.dumps(question).encode() + b"\n")
                process.stdin.flush()
            answers = [_answer(process.stdout) for process in self._processes if process.stdout is not None]
        except (OSError, ValueError) as error:
            _ranks.cache_clear()
            self.end()
            raise CheckFailed(f"the ranks have ended ({type(error).__name__}: {error}); their own output says why") from None
        for said, _ in answers:
            if "failed" in said:
                raise CheckFailed(said["failed"])
        return answers[0][0]["loss"], load(answers[0][1])

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


def _answer(stream: IO[bytes]) -> tuple[dict[str, Any], bytes]:
    """A line of JSON, and as many bytes as it says."""
    said = json.loads(stream.readline())
    return said, stream.read(said.get("bytes", 0))


def _serve() -> None:
    """What each of the processes does."""
    meeting, rank = sys.argv[1], int(sys.argv[2])
    answers, sys.stdout = os.fdopen(os.dup(sys.stdout.fileno()), "wb"), sys.stderr
    torch.set_num_threads(1)
    store = dist.FileStore(meeting, RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=WAIT_SECONDS))
    mesh = dist.init_device_mesh("cpu", (RANKS,))
    for line in sys.stdin.buffer:
        gradients = b""
        try:
            loss, found = _measure(_config(json.loads(line)), mesh, rank)
            gradients = save(found) if rank == 0 else b""
            said: dict[str, Any] = {"loss": loss, "bytes": len(gradients)}
        except Exception as error:
            said = {"failed": f"{type(error).__name__} on rank {rank}: {' '.join(str(error).split())}"}
        answers.write(json.dumps(said).encode() + b"\n" + gradients)
        answers.flush()
    os._exit(0)


def _config(question: dict[str, Any]) -> AxisConfig:
    """The configuration that another process was asked about; its class must be one of a module."""
    found = reduce(getattr, question["name"].split("."), import_module(question["module"]))
    return found.from_data(question["data"])


def _measure(config: AxisConfig, mesh: Any, rank: int) -> tuple[float, dict[str, Tensor]]:
    from torch.distributed.tensor import DTensor

    from twoaxis.train.parallel.sharding import local_part, shard

    whole = dict(toy_decoder(config, dtype=torch.float32).named_parameters())
    model, _ = shard(decoder_config(config), mesh, 0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            parameter.to_local().copy_(local_part(whole[name], parameter))
    loss = _loss(model, toy_tokens(2 * RANKS).chunk(RANKS)[rank])
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    gradients = {
        name: parameter.grad.full_tensor().contiguous()
        for name, parameter in model.named_parameters()
        if isinstance(parameter.grad, DTensor)
    }
    return total.item(), gradients
