"""Parameters that the first and the last rank of a pipeline both hold: their gradient is the sum over both."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn


class SharedGradients:
    """Sums the gradients of shared parameters over two ranks, which start equal and therefore stay equal.

    The two send each other their parts, since a process group of two would have to be made by all processes in concert.

    Args:
        parameters: in the same order on both ranks.
        other: the other rank in the group.
        group: of the pipeline.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], other: int, group: dist.ProcessGroup | None) -> None:
        self.parameters, self.other, self.group = parameters, other, group

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
        # A parameter that only one of the two has used still has a sum, and one that none has used has no gradient.
        used = torch.tensor([parameter.grad is not None for parameter in self.parameters], device=self.parameters[0].device)
        used = used.int()
        for parameter, users in zip(self.parameters, (used + self._exchange(used)).tolist(), strict=True):
            if users:
                own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
                parameter.grad = own + self._exchange(own)

    def _exchange(self, own: Tensor) -> Tensor:
        """Sends a tensor to the other rank and returns what that has sent."""
        received = torch.empty_like(own)
        ways = ((dist.isend, own), (dist.irecv, received))
        for work in dist.batch_isend_irecv(
            [dist.P2POp(way, tensor, group=self.group, group_peer=self.other) for way, tensor in ways]
        ):
            work.wait()
        return received
