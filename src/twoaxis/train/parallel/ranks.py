"""The processes of a run: started by `torchrun`, joined here, and what they exchange besides tensors of the model."""

import gc
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from twoaxis.core.errors import CheckpointError, ConfigError, DataError, TwoAxisError, problem
from twoaxis.train.parallel.spread import ParallelConfig

T = TypeVar("T")

MESH = ("pipeline", "replicate", "shard", "tensor")
"""The dimensions of the mesh of ranks; the last one has neighbours."""

KINDS: Mapping[str, type[TwoAxisError]] = {kind.__name__: kind for kind in (ConfigError, DataError, CheckpointError)}
"""The errors that one rank reports to the others, by name."""

LOST = ("gloo", "Gloo", "NCCL", "Connection closed", "Connection reset", "Broken pipe", "Timed out", "timed out", "c10d")
"""Words in the errors of collectives whose other side is gone."""


class Ranks:
    """The processes of one run; a run of one process sends nothing.

    Args:
        mesh: the ranks by the dimensions `MESH`; None for one process.
        group: what they exchange values over; None is the default group.
        timeout: of further groups.

    Attributes:
        rank: of this process, from 0.
        count: of all processes.
    """

    def __init__(
        self,
        mesh: DeviceMesh | None = None,
        group: dist.ProcessGroup | None = None,
        timeout: timedelta = timedelta(minutes=10),
    ) -> None:
        self.mesh, self.group, self.timeout = mesh, group, timeout
        self.rank, self.count = (0, 1) if mesh is None else (dist.get_rank(), dist.get_world_size())

    @property
    def is_first(self) -> bool:
        """Whether this process writes the folder of the run and tells its progress."""
        return self.rank == 0

    @property
    def device(self) -> torch.device | None:
        """The device of this rank; None leaves the choice to the recipe."""
        if self.mesh is None or self.mesh.device_type == "cpu":
            return None
        return torch.device(self.mesh.device_type, torch.accelerator.current_device_index())

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks."""
        if self.count > 1:
            values = values.clone()
            dist.all_reduce(values, group=self.group)
        return values

    def largest(self, number: int) -> int:
        """The largest of the numbers of all ranks."""
        if self.count == 1:
            return number
        value = torch.tensor(number)
        dist.all_reduce(value, dist.ReduceOp.MAX, group=self.group)
        return int(value)

    def gather(self, value: Any) -> list[Any]:
        """The JSON-ready values of all ranks, in order."""
        if self.count == 1:
            return [value]
        own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.count)]
        dist.all_gather(sizes, torch.tensor([own.numel()]), group=self.group)
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: own.numel()] = own
        found = [torch.empty_like(padded) for _ in range(self.count)]
        dist.all_gather(found, padded, group=self.group)
        return [json.loads(one[: int(size)].numpy().tobytes()) for one, size in zip(found, sizes, strict=True)]

    def each(self, work: Callable[[], T]) -> T:
        """Has every rank do its work, without collectives; an error of one is an error of all.

        Raises:
            TwoAxisError: the error of the lowest rank that has one.
        """
        if self.count == 1:
            return work()
        done, failed = None, None
        try:
            done = work()
        except TwoAxisError as error:
            kind = next((name for name, one in KINDS.items() if isinstance(error, one)), "CheckpointError")
            failed = {"kind": kind, "message": str(error)}
        for error in self.gather(failed):
            if error is not None:
                raise _agreed(KINDS[error["kind"]](error["message"]))
        return cast(T, done)

    def first(self, work: Callable[[], T]) -> T:
        """Has the first rank do a work with a JSON-ready result, which all return."""
        found = self.each(lambda: work() if self.is_first else None)
        return self.gather(found)[0]

    def in_turn(self, work: Callable[[], T]) -> T:
        """Has the first rank do a work before all others, which then find its files; it may take long."""
        if self.count == 1:
            return work()
        # A rank that dies closes its connections, whatever the timeout.
        patient = self.apart(timedelta(days=7))
        found = patient.each(lambda: work() if self.is_first else None)
        other = patient.each(lambda: None if self.is_first else work())
        return cast(T, found if self.is_first else other)

    def check_same(self, what: Mapping[str, str]) -> None:
        """Compares values by name between all ranks.

        Raises:
            ConfigError: the first that differs.
        """
        everywhere = self.gather(dict(what))
        for name, value in everywhere[0].items():
            other = next((rank for rank, values in enumerate(everywhere) if values[name] != value), None)
            if other is not None:
                raise _agreed(
                    ConfigError(
                        f"{name}: {value} on rank 0, {everywhere[other][name]} on rank {other}: must be equal on all ranks; "
                        "start every process with the same recipe, files and versions"
                    )
                )

    def apart(self, timeout: timedelta | None = None) -> "Ranks":
        """The same ranks with a group of their own, for a thread that exchanges values beside the run, or for long waits."""
        if self.count == 1:
            return self
        group = dist.new_group(backend="gloo", timeout=timeout or self.timeout)
        assert isinstance(group, dist.ProcessGroup), "every rank is in the group"
        return Ranks(self.mesh, group, self.timeout)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Turns the error of a collective whose other side is gone into one line.

        Raises:
            CheckpointError: a rank has ended, or has not answered in time.
        """
        try:
            yield
        except RuntimeError as error:
            if self.count == 1 or not _is_of_lost_rank(error):
                raise
            if self.is_first and threading.current_thread() is threading.main_thread():
                # The launcher ends all processes now; this one first says why.
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            raise CheckpointError(
                f"rank {self.rank} of {self.count}: another process of the run has ended or does not answer; complete "
                "checkpoints are intact; start all processes again to resume"
            ) from error


@contextmanager
def joined(config: ParallelConfig, device: str = "auto") -> Iterator[Ranks]:
    """Joins the processes that `torchrun` has started, one for each rank of the layout.

    Raises:
        ConfigError: another number of processes, or processes that do not find each other.
    """
    started = int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1
    if started != config.ranks:
        sizes = (f"{name}={size}" for name in MESH if (size := getattr(config, name)) > 1)
        allowed = f"{config.ranks} as parallel has {' * '.join(sizes) or 'one process'}"
        start = f"start them with: torchrun --nproc-per-node {config.ranks} -m twoaxis train RECIPE"
        raise _agreed(ConfigError(problem("processes", started, allowed, start if started == 1 else "change one of them")))
    if started == 1:
        yield Ranks()
        return
    kind, timeout = _take_device(device), timedelta(seconds=config.timeout_seconds)
    try:
        # Values of the run are exchanged on the CPU, tensors of the model on their device.
        backend = "gloo" if kind == "cpu" else f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}"
        dist.init_process_group(backend, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"rank {os.environ['RANK']}: cannot join the others ({str(error).splitlines()[0]}); check that all processes are "
            "started, and that MASTER_ADDR and MASTER_PORT are reachable and free"
        ) from None
    try:
        mesh = init_device_mesh(kind, tuple(getattr(config, name) for name in MESH), mesh_dim_names=MESH)
        for name in MESH:
            # torch gives the groups of a mesh its own timeout, and has no public way to set another.
            distributed_c10d._set_pg_timeout(timeout, mesh[name].get_group())
        yield Ranks(mesh, timeout=timeout)
    finally:
        # Models that hold process groups must go first, or gloo ends the process with an abort.
        gc.collect()
        dist.destroy_process_group()


def _agreed(error: TwoAxisError) -> TwoAxisError:
    error.on_all_ranks = True
    return error


def _is_of_lost_rank(error: BaseException | None) -> bool:
    # The stages of a pipeline wrap errors in others.
    return error is not None and (any(word in str(error) for word in LOST) or _is_of_lost_rank(error.__cause__))


def _take_device(device: str) -> str:
    """Takes the device of this rank; returns its kind.

    Raises:
        ConfigError: a device by its number, or one that this machine does not have.
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    kind = ("cpu" if found is None else found.type) if device == "auto" else torch.device(device).type
    if device != "auto" and torch.device(device).index is not None:
        allowed = f"{kind!r} or 'auto' with several processes, each of which takes the device of its number"
        raise _agreed(ConfigError(problem("device", device, allowed, f"use device={kind}")))
    if kind != "cpu":
        number, there = int(os.environ.get("LOCAL_RANK", "0")), torch.accelerator.device_count()
        if found is None or found.type != kind or number >= there:
            has = f"{there} of {found.type}" if found is not None else "none"
            raise ConfigError(
                f"device={device!r}: process {number} of this machine has no device of its own, it has {has}; must be one for "
                "each process; start fewer processes or use device=cpu"
            )
        torch.accelerator.set_device_index(number)
    return kind
