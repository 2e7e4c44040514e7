"""Shared state of a pipeline: tensors that a rank caches for later stages, and gradients of parameters on several ranks."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass
class CachedTensor:
    """A tensor with its graph, and the gradient accumulated from later stages."""

    tensor: Tensor
    gradient: Tensor | None = None


class StageCache:
    """The tensors that the stages of one rank share, by microbatch and number.

    A later stage gets a tensor as a detached leaf, so no graph spans two stages. Its gradient is accumulated here until the
    backward pass of the stage that cached the tensor, which runs later on the same rank.
    """

    def __init__(self) -> None:
        self._cached: dict[tuple[int, int], CachedTensor] = {}

    def __len__(self) -> int:
        return len(self._cached)

    def put(self, microbatch: int, number: int, tensor: Tensor) -> None:
        """Caches a tensor until `pop`."""
        self._cached[microbatch, number] = CachedTensor(tensor)

    def get_grad_leaf(self, microbatch: int, number: int) -> Tensor:
        """Returns a cached tensor as a leaf that requires a gradient if the tensor does."""
        tensor = self._cached[microbatch, number].tensor
        return tensor.detach().requires_grad_(tensor.requires_grad and torch.is_grad_enabled())

    def accumulate_grad(self, microbatch: int, number: int, gradient: Tensor) -> None:
        """Adds the gradient of a leaf."""
        cached = self._cached[microbatch, number]
        cached.gradient = gradient if cached.gradient is None else cached.gradient + gradient

    def pop(self, microbatch: int, numbers: Iterable[int]) -> list[CachedTensor]:
        """Removes and returns cached tensors with their gradients."""
        return [self._cached.pop((microbatch, number)) for number in numbers]


Sum = Callable[[Tensor], Tensor]
"""Returns the sum of a tensor over some ranks, each of which calls it."""


def sum_over_two(other: int, group: dist.ProcessGroup | None) -> Sum:
    """The sum over this rank and the rank `other` of the group.

    The two exchange their tensors, since all processes would have to take part in creating a process group of two.
    """

    def summed(own: Tensor) -> Tensor:
        received = torch.empty_like(own)
        ways = ((dist.isend, own), (dist.irecv, received))
        for work in dist.batch_isend_irecv([dist.P2POp(way, tensor, group=group, group_peer=other) for way, tensor in ways]):
            work.wait()
        return own + received

    return summed


def sum_over_all(group: dist.ProcessGroup | None) -> Sum:
    """The sum over all ranks of the group."""

    def summed(own: Tensor) -> Tensor:
        total = own.clone()
        dist.all_reduce(total, group=group)
        return total

    return summed


class SharedGradients:
    """Sums the gradients of shared parameters over their ranks, which start equal and therefore stay equal.

    The parameters have the same order on all of these ranks.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], sum_over_ranks: Sum) -> None:
        self.parameters, self._sum_over_ranks = parameters, sum_over_ranks

    @contextmanager
    def summed(self) -> Iterator[None]:
        """Sums the gradients of backward passes inside; gradients from before are sums already."""
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
        # A parameter that only some ranks have used still has a sum; one that none has used has no gradient.
        used = torch.tensor([parameter.grad is not None for parameter in self.parameters], device=self.parameters[0].device)
        for parameter, users in zip(self.parameters, self._sum_over_ranks(used.int()).tolist(), strict=True):
            if users:
                own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
                parameter.grad = self._sum_over_ranks(own)
