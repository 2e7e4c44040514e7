"""What ranks of a pipeline share: values kept of a microbatch for later stages, and parameters that several ranks hold."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass
class Kept:
    """A tensor with its graph, and the sum of the gradients that later stages have given back so far."""

    tensor: Tensor
    gradient: Tensor | None = None


class Store:
    """The tensors that the stages of one rank share, by microbatch and number.

    A later stage borrows a tensor as the leaf of a graph of its own, so no graph spans two stages. Its gradient waits here
    until the backward pass of the stage that has kept the tensor, which comes later on the same rank.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], Kept] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, microbatch: int, number: int, tensor: Tensor) -> None:
        """Keeps a tensor until `release`."""
        self._kept[microbatch, number] = Kept(tensor)

    def borrow(self, microbatch: int, number: int) -> Tensor:
        """Returns a kept tensor as a leaf, which has a gradient where the tensor has one."""
        tensor = self._kept[microbatch, number].tensor
        return tensor.detach().requires_grad_(tensor.requires_grad and torch.is_grad_enabled())

    def give_back(self, microbatch: int, number: int, gradient: Tensor) -> None:
        """Adds the gradient of a borrowed tensor."""
        kept = self._kept[microbatch, number]
        kept.gradient = gradient if kept.gradient is None else kept.gradient + gradient

    def release(self, microbatch: int, numbers: Iterable[int]) -> list[Kept]:
        """Returns kept tensors with their gradients and forgets them."""
        return [self._kept.pop((microbatch, number)) for number in numbers]


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
