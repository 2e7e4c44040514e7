"""Two ranks that share out the parameters and the rows of a batch compute what one process does.

The ranks are two processes that the first check starts and that end with this one.
"""

import atexit
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
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
    tokens = toy_tokens(2 * RANKS)
    loss = mean_loss(model, tokens)
    loss.backward()
    found, arrays = ask_ranks(_measure, config)[0]
    gradients = {name: torch.from_numpy(one) for name, one in arrays.items()}
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


def mean_loss(model: Decoder, tokens: Tensor, rows: int | None = None) -> Tensor:
    """The summed loss of rows whose last token is a target only, over the targets of all `rows` rows."""
    total, _ = model.loss(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    return total / ((rows or len(tokens)) * (tokens.shape[1] - 1))


def ask_ranks(measure: Callable[..., Any], *given: Any) -> list[Any]:
    """What a function of a module returns on every rank, called with a mesh of all ranks, the rank, and what is given.

    Raises:
        CheckFailed: an error on a rank.
    """
    return _ranks().measure(measure, given)


class _Ranks:
    """The processes; each reads functions with their arguments from its input and writes what they return."""

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

    def measure(self, function: Callable[..., Any], given: tuple[Any, ...]) -> list[Any]:
        """What the function returns on each rank."""
        try:
            for process in self._processes:
                assert process.stdin is not None
                pickle.dump((function, given), process.stdin)
                process.stdin.flush()
            answers = [pickle.load(process.stdout) for process in self._processes if process.stdout is not None]
        except (OSError, EOFError, pickle.PicklingError, AttributeError) as error:
            _ranks.cache_clear()
            self.end()
            raise CheckFailed(f"the ranks have ended ({type(error).__name__}: {error}); their own output says why") from None
        for answer in answers:
            if isinstance(answer, str):
                raise CheckFailed(answer)
        return answers

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
    """What each of the processes does."""
    meeting, rank = sys.argv[1], int(sys.argv[2])
    answers, sys.stdout = os.fdopen(os.dup(sys.stdout.fileno()), "wb"), sys.stderr
    questions = sys.stdin.buffer
    torch.set_num_threads(1)
    store = dist.FileStore(meeting, RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=WAIT_SECONDS))
    mesh = dist.init_device_mesh("cpu", (RANKS,))
    while (question := _next(questions)) is not None:
        function, given = question
        try:
            answer: Any = function(mesh, rank, *given)
        except Exception as error:
            answer = f"{type(error).__name__} on rank {rank}: {' '.join(str(error).split())}"
        pickle.dump(answer, answers)
        answers.flush()
    os._exit(0)


def _next(questions: BinaryIO) -> Any:
    try:
        return pickle.load(questions)
    except EOFError:
        return None


def _measure(mesh: Any, rank: int, config: AxisConfig) -> tuple[float, dict[str, Any]]:
    from torch.distributed.tensor import DTensor

    from twoaxis.train.parallel.sharding import local_part, shard

    whole = dict(toy_decoder(config, dtype=torch.float32).named_parameters())
    model, _ = shard(decoder_config(config), mesh, 0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            parameter.to_local().copy_(local_part(whole[name], parameter))
    loss = mean_loss(model, toy_tokens(2 * RANKS).chunk(RANKS)[rank], rows=2 * RANKS)
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    gradients = {
        name: parameter.grad.full_tensor().numpy()
        for name, parameter in model.named_parameters()
        if isinstance(parameter.grad, DTensor)
    }
    return total.item(), gradients
