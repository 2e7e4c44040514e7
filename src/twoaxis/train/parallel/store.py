"""What a rank keeps of a microbatch for its later stages, and the gradients that these give back."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


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
