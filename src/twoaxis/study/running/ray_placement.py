"""What every run of a study gets of a Ray cluster, and in which words a run waits for it."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from twoaxis.core.errors import StudyError

GPUs = Literal["none", "available", "required"]
"""Whether runs take a GPU: never, where the cluster has any, or nowhere without."""

Machines = Sequence[Mapping[str, float]]
"""The resources of each live machine, by CPU and GPU."""


def gpus_for(devices: Iterable[str]) -> GPUs:
    """Whether runs on these devices take a GPU; the devices are those of recipes, such as `auto` and `cuda:1`."""
    kinds = {device.partition(":")[0] for device in devices}
    return "required" if "cuda" in kinds else "available" if "auto" in kinds else "none"


class Share(NamedTuple):
    """The resources of every run.

    Attributes:
        jobs: number of runs at once.
        cpus: processors per run, on one machine.
        gpus: per run, 0 or 1: a run is one process, which computes on one device.
    """

    jobs: int
    cpus: int
    gpus: int

    def fits(self, machine: Mapping[str, float]) -> bool:
        """Whether the machine can hold such a run when it is idle."""
        return machine.get("CPU", 0) >= self.cpus and machine.get("GPU", 0) >= self.gpus

    @property
    def words(self) -> str:
        """Names the resources of one run.

        Example:
            >>> Share(jobs=1, cpus=8, gpus=1).words
            '8 processors and 1 GPU'
        """
        return f"{_count(self.cpus, 'processor')} and {_count(self.gpus, 'GPU')}"


def share_out(machines: Machines, jobs: int, gpus: GPUs = "available") -> Share:
    """Finds the largest share at which `jobs` runs fit at once, or fewer runs where none fits.

    GPUs are never shared: where runs take one, at most as many run at once as there are GPUs.

    Args:
        machines: of the cluster; a run is on one of them.
        jobs: requested number of runs at once.
        gpus: whether runs take one.

    Raises:
        StudyError: no machine has a processor to give, or none has a GPU where one is required.

    Example:
        >>> share_out([{"CPU": 1}, {"CPU": 1}], jobs=1), share_out([{"CPU": 16, "GPU": 3}], jobs=2)
        (Share(jobs=1, cpus=1, gpus=0), Share(jobs=2, cpus=8, gpus=1))
    """
    # A GPU without a processor beside it runs nothing.
    usable = [one for one in machines if one.get("CPU", 0) >= 1]
    if not usable:
        raise StudyError(
            f"engine 'ray': a run needs 1 processor; the cluster has {cluster_words(machines)}; add a machine with `ray start`"
        )
    with_gpu = [one for one in usable if one.get("GPU", 0) >= 1]
    if gpus == "required" and not with_gpu:
        raise StudyError(
            f"engine 'ray': a recipe with device = \"cuda\" needs 1 GPU and 1 processor on one machine; the cluster has "
            f'{cluster_words(machines)}; add a machine with a GPU, or set device = "auto"'
        )
    per_run = 1 if with_gpu and gpus != "none" else 0
    hosts = with_gpu if per_run else usable

    def capacity(cpus: int) -> int:
        return sum(min(int(one["CPU"] // cpus), int(one["GPU"]) if per_run else jobs) for one in hosts)

    jobs = min(jobs, capacity(1))
    most = int(max(one["CPU"] for one in hosts))
    cpus = next(cpus for cpus in range(most, 0, -1) if capacity(cpus) >= jobs)
    return Share(jobs, cpus, per_run)


def cluster_words(machines: Machines) -> str:
    """Names the machines of a cluster, equal ones together.

    Example:
        >>> cluster_words([{"CPU": 1}, {"CPU": 1}, {"CPU": 16, "GPU": 2}])
        '2 machines with 1 processor and 0 GPUs, 1 machine with 16 processors and 2 GPUs'
    """
    kinds: dict[str, int] = {}
    for one in machines:
        kind = f"{_count(one.get('CPU', 0), 'processor')} and {_count(one.get('GPU', 0), 'GPU')}"
        kinds[kind] = kinds.get(kind, 0) + 1
    return ", ".join(f"{_count(number, 'machine')} with {kind}" for kind, number in kinds.items()) or "no machine"


def waiting_words(share: Share, machines: Machines, free: Mapping[str, float]) -> str:
    """Says what a run asks for, what the cluster has of it, and what to change."""
    left = f"{_count(free.get('CPU', 0), 'processor')} and {_count(free.get('GPU', 0), 'GPU')} are free in all"
    asked = f"asks for {share.words} on one machine; the cluster has {cluster_words(machines)}, of which {left}"
    smaller = ", or use a higher --jobs for smaller shares" if share.cpus > 1 else ""
    return f"{asked}; end other work on the cluster, or add machines with `ray start`{smaller}"


def _count(number: float, name: str) -> str:
    return f"{number:g} {name}{'' if number == 1 else 's'}"
