"""What an operation reads of the tensors it is given and what it makes anew, number by number."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from twoaxis.core.measure import SHAPE_ONLY, tensors


def place(tensor: Tensor) -> int:
    """Where the memory behind a tensor begins, its other views included."""
    return tensor.untyped_storage().data_ptr()


class Numbered:
    """A set of numbers in memory, each counted once however many tensors or slices show it."""

    def __init__(self) -> None:
        self._seen: dict[int, Tensor] = {}
        self._sizes: dict[int, int] = {}

    def add(self, tensor: Tensor) -> None:
        """Adds the numbers of a tensor or of a slice of one."""
        size = tensor.element_size()
        everything = torch.arange(tensor.untyped_storage().nbytes() // size)
        seen = self._seen.setdefault(place(tensor), torch.zeros(len(everything), dtype=torch.bool))
        self._sizes[place(tensor)] = size
        seen[everything.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).flatten()] = True

    def bytes(self) -> int:
        """Bytes of all of them."""
        return sum(int(seen.sum()) * self._sizes[where] for where, seen in self._seen.items())


def new_bytes(made: Any, given: Any) -> int:
    """Bytes of the tensors in `made` that are neither those in `given` nor views of them."""
    known = {place(tensor) for tensor in tensors(given)}
    found = Numbered()
    for tensor in tensors(made):
        if place(tensor) not in known:
            found.add(tensor)
    return found.bytes()


class Reads(TorchDispatchMode):
    """Notes every number of the given tensors that an operation touches; to take a view or a shape touches none.

    A slice counts as the slice, and an operation on the whole tensor as the whole of it.
    """

    def __init__(self, given: Iterable[Tensor]) -> None:
        super().__init__()
        self._given = {place(tensor) for tensor in given}
        self.touched = Numbered()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operation and looks at what it was given."""
        result = func(*args, **(kwargs or {}))
        inputs, outputs = tensors((args, kwargs)), tensors(result)
        known = {place(tensor) for tensor in inputs}
        views_only = bool(outputs) and all(place(tensor) in known for tensor in outputs)
        is_view = views_only and not func._schema.is_mutable
        if not is_view and func.overloadpacket.__name__ not in SHAPE_ONLY:
            for tensor in inputs:
                if place(tensor) in self._given:
                    self.touched.add(tensor)
        return result
