"""Sublayers that run the same as an earlier one: their measurement is used again, on the tensors that are there now."""

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from twoaxis.core.measure import storage_of, tensors

R = TypeVar("R")

KEPT = ("_parameters", "_buffers", "_modules", "training")
IGNORED = {name for name in vars(nn.Module()) if name not in KEPT} | {"declarations"}
"""Attributes of a module on which no operation depends: hooks, and initial values."""


def likeness(value: Any) -> Any:
    """All that a module and its backward pass depend on, hashable; equal for modules that run the same on equal tensors."""
    if isinstance(value, Tensor):
        # A second gradient is added to the first.
        added = value.is_leaf and value.grad is not None
        return ("tensor", tuple(value.shape), value.stride(), value.dtype, value.requires_grad, added)
    if isinstance(value, nn.Module):
        return (type(value), *((name, likeness(each)) for name, each in vars(value).items() if name not in IGNORED))
    if isinstance(value, dict):
        return tuple((name, likeness(each)) for name, each in value.items())
    if isinstance(value, list | tuple):
        return tuple(likeness(each) for each in value)
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value


def pattern(state: Any) -> Any:
    """Geometry of the tensors of a state, and which of them share memory; equal for states that look the same."""
    leaves, spec = tree_flatten(state)
    numbers: dict[int, int] = {}
    with torch._C.DisableTorchFunction():
        memory = [numbers.setdefault(storage_of(t), len(numbers)) for t in leaves]
        found = [(n, t.shape, t.stride(), t.storage_offset(), t.dtype) for n, t in zip(memory, leaves, strict=True)]
    return spec, tuple(found)


@dataclass(frozen=True)
class Storage:
    """Memory behind a tensor: that of a tensor of the state that enters, or new.

    Attributes:
        number: of the tensor in the state, or of the new storage.
        size: bytes of a new one; None for one of the state.
        dtype: of a new one.
    """

    number: int
    size: int | None = None
    dtype: torch.dtype = torch.uint8


@dataclass(frozen=True)
class Repeat(Generic[R]):
    """What a sublayer makes, without its tensors.

    Attributes:
        result: its measurement.
        saves: the memory of what it saves.
        following: the memory and the geometry of each tensor of the next state.
        spec: how these are nested.
    """

    result: R
    saves: tuple[Storage, ...]
    following: tuple[tuple[Storage, Any, Any, int, torch.dtype], ...]
    spec: TreeSpec

    @classmethod
    def of(cls, result: R, state: Any, saves: list[Tensor], following: Any) -> "Repeat[R]":
        """The record of one sublayer."""
        known = {storage_of(tensor): Storage(number) for number, tensor in reversed(list(enumerate(tensors(state))))}

        def memory(tensor: Tensor) -> Storage:
            return known.setdefault(storage_of(tensor), Storage(len(known), tensor.untyped_storage().nbytes(), tensor.dtype))

        leaves, spec = tree_flatten(following)
        with torch._C.DisableTorchFunction():
            made = tuple((memory(t), t.shape, t.stride(), t.storage_offset(), t.dtype) for t in leaves)
            return cls(result, tuple(memory(tensor) for tensor in saves), made, spec)

    def on(self, state: Any) -> tuple[list[Tensor], Any]:
        """What another sublayer saves that runs the same on this state, and the next state."""
        leaves, made = tensors(state), dict[Storage, Tensor]()

        def memory(storage: Storage) -> Tensor:
            if storage.size is None:
                return leaves[storage.number]
            if storage not in made:
                made[storage] = torch.empty(
                    storage.size // storage.dtype.itemsize, dtype=storage.dtype, device=leaves[0].device
                )
            return made[storage]

        with torch._C.DisableTorchFunction():
            following = [
                torch.empty(0, dtype=dtype, device=leaves[0].device).set_(
                    memory(storage).untyped_storage(), offset, shape, stride
                )
                for storage, shape, stride, offset, dtype in self.following
            ]
            return [memory(storage) for storage in self.saves], tree_unflatten(following, self.spec)
