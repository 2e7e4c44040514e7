"""Parameters that several ranks of a pipeline hold: their gradient is the sum over those ranks."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

Sum = Callable[[Tensor], Tensor]
"""Returns the sum of a tensor over some ranks, each of which calls it with its own part."""


def sum_over_two(other: int, group: dist.ProcessGroup | None) -> Sum:
    """The sum over this rank and another one.

    The two send each other their parts, since a process group of two would have to be made by all processes in concert.

    Args:
        other: the other rank in the group.
        group: of the pipeline.
    """

    def summed(own: Tensor) -> Tensor:
        received = torch.empty_like(own)
        ways = ((dist.isend, own), (dist.irecv, received))
        for work in dist.batch_isend_irecv([dist.P2POp(way, tensor, group=group, group_peer=other) for way, tensor in ways]):
            work.wait()
        return own + received

    return summed


def sum_over_all(group: dist.ProcessGroup | None) -> Sum:
    """The sum over all ranks of the pipeline."""

    def summed(own: Tensor) -> Tensor:
        total = own.clone()
        dist.all_reduce(total, group=group)
        return total

    return summed


class SharedGradients:
    """Sums the gradients of shared parameters over the ranks that hold them, which start equal and therefore stay equal.

    Args:
        parameters: in the same order on all of these ranks.
        sum_over_ranks: adds up their parts.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], sum_over_ranks: Sum) -> None:
        self.parameters, self._sum_over_ranks = parameters, sum_over_ranks

    @contextmanager
    def summed(self) -> Iterator[None]:
        """Sums what the backward passes inside add to the gradients; what stood there before is a sum already."""
        before = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        yield
        self._sum()
        for parameter, earlier in zip(self.parameters, before, strict=True):
            if earlier is not None:
                parameter.grad = earlier if parameter.grad is None else earlier + parameter.grad

    @torch.no_grad()
    def _sum(self) -> None:
        if not self.parameters:
            return
        # A parameter that only some of the ranks have used still has a sum, and one that none has used has no gradient.
        used = torch.tensor([parameter.grad is not None for parameter in self.parameters], device=self.parameters[0].device)
        for parameter, users in zip(self.parameters, self._sum_over_ranks(used.int()).tolist(), strict=True):
            if users:
                own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
                parameter.grad = self._sum_over_ranks(own)
