"""What any computation reads, makes, saves for its backward pass and takes in operations; no model of ours is needed.

All of it holds for tensors without memory too, so that the largest model is measured as fast as a small one.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from twoaxis.core.meta_results import result_of


def noise(shape: tuple[int, ...], name: str) -> Tensor:
    """Standard normal float64 numbers that depend on the shape and the name only."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@torch.no_grad()
def perturb(model: Any, seed: int = 0) -> Any:
    """Adds noise to every parameter, by its name: with scale 0.5, over sqrt(fan in) for matrices."""
    for name, parameter in model.named_parameters():
        scale = 0.5 if parameter.ndim < 2 or "embedding" in name else 0.5 / parameter.shape[-1] ** 0.5
        parameter.add_(noise(tuple(parameter.shape), f"perturb/{seed}/{name}").to(parameter.dtype), alpha=scale)
    return model


def distance(a: Tensor, b: Tensor) -> float:
    """The largest absolute difference between entries; NaN counts as infinite."""
    if not a.numel():
        return 0.0
    return float(torch.nan_to_num((a.detach().double() - b.detach().double()).abs(), nan=torch.inf).max())


T = TypeVar("T")

_ATOMS = (int, float, str, torch.dtype, torch.device, type(None))

PAIR_PRODUCTS = ("bmm", "baddbmm", "scaled_dot_product")

SHAPE_ONLY = ("empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros", "new_ones", "new_full")
"""Operations that take a tensor for its shape and dtype and read no element of it."""

NOTHING_MOVED = (
    "empty",
    "new_empty",
    "view",
    "alias",
    "lift_fresh",
    "detach",
    "expand",
    "permute",
    "transpose",
    "slice",
    "select",
    "split",
    "unbind",
    "squeeze",
    "unsqueeze",
)
"""Operations that move nothing."""


def tensors(value: Any) -> list[Tensor]:
    """Every tensor of a nested value, in order."""
    found: list[Tensor] = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list[Tensor]) -> None:
    # Faster than any walk that allows for nodes of other libraries, and called with every operation.
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, tuple) or type(value) is list:
        for each in value:
            _collect(each, found)
    elif type(value) is dict:
        _collect(tuple(value.values()), found)
    elif not isinstance(value, _ATOMS):
        found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


class Operation:
    """One operation that PyTorch has run."""

    def __init__(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        self.function, self.args, self.kwargs, self.result = function, args, kwargs, result

    @property
    def name(self) -> str:
        """Its name, the same for all overloads and for the form in place."""
        return self.function.overloadpacket.__name__.strip("_")

    @cached_property
    def given(self) -> list[Tensor]:
        """The tensors it was given."""
        return tensors((self.args, self.kwargs))

    @cached_property
    def made(self) -> list[Tensor]:
        """The tensors it has returned."""
        return tensors(self.result)

    @property
    def moves(self) -> bool:
        """Whether it reads or writes elements, and does not only name some."""
        return not self.name.startswith(NOTHING_MOVED)


class Operations(TorchDispatchMode):
    """Calls back with every operation that PyTorch runs, those of backward passes included.

    Args:
        note: called behind each operation; with None they run without what other modes look at, and so faster.
        decompose: whether an operation that consists of others is reported as these.

    Example:
        >>> names = []
        >>> with Operations(lambda operation: names.append(operation.name)):
        ...     _ = torch.ones(2, 2) @ torch.ones(2, 2)
        >>> names
        ['ones', 'ones', 'mm']
    """

    def __init__(self, note: Callable[[Operation], None] | None, decompose: bool = False) -> None:
        super().__init__()
        self._note, self._decompose = note, decompose

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operation and reports it."""
        kwargs = kwargs or {}
        if self._decompose:
            # Inference mode would hide them.
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        # What implements an operation calls functions of torch, which other modes need not look at again.
        with torch._C.DisableTorchFunction():
            result = args[0] if _changes_nothing(func, args) else result_of(func, args, kwargs)
            if self._note is not None:
                self._note(Operation(func, args, kwargs, result))
        return result


def _changes_nothing(func: Any, args: Any) -> bool:
    """Whether an operation writes elements in place where there are none."""
    return torch.Tag.pointwise in func.tags and func.__name__.partition(".")[0].endswith("_") and args[0].is_meta


_EVERY_WAY: ContextVar[bool] = ContextVar("_EVERY_WAY", default=True)


@contextmanager
def first_ways() -> Iterator[None]:
    """Lets engines that compute many results of the same sources compute the first, where their kernels do not count."""
    token = _EVERY_WAY.set(False)
    try:
        yield
    finally:
        _EVERY_WAY.reset(token)


def ways(each: Iterable[T]) -> list[T]:
    """All results of an engine that reads and saves the same for each; the first alone within `first_ways`."""
    found = list(each)
    # A compiler cannot read context variables.
    return found if torch.compiler.is_compiling() or _EVERY_WAY.get() else found[:1]


def storage_of(tensor: Tensor) -> int:
    """Identifies the storage behind a tensor, which its views share, with memory or without."""
    # Modes that look at every call of torch need not see this one.
    with torch._C.DisableTorchFunction():
        return tensor.untyped_storage()._cdata


def storages_of(value: Any) -> set[int]:
    """The storages behind all tensors of a nested value."""
    with torch._C.DisableTorchFunction():
        return {tensor.untyped_storage()._cdata for tensor in tensors(value)}


NOTHING: Mapping[torch.dtype, torch.dtype] = MappingProxyType({})

_IN_PLACE_OF: ContextVar[Mapping[torch.dtype, torch.dtype]] = ContextVar("_IN_PLACE_OF", default=NOTHING)


@contextmanager
def counted_as(dtypes: Mapping[torch.dtype, torch.dtype]) -> Iterator[None]:
    """Counts tensors of these dtypes, which run, as those in whose place they run and in which PyTorch computes nothing."""
    token = _IN_PLACE_OF.set(dtypes)
    try:
        yield
    finally:
        _IN_PLACE_OF.reset(token)


def counted_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that a tensor of this dtype counts as."""
    return _IN_PLACE_OF.get().get(dtype, dtype)


def element_bytes(tensor: Tensor) -> int:
    """Bytes of one element."""
    return counted_dtype(tensor.dtype).itemsize


def bytes_behind(tensor: Tensor) -> int:
    """Bytes of the whole storage behind a tensor."""
    with torch._C.DisableTorchFunction():
        return tensor.untyped_storage().nbytes() // tensor.element_size() * element_bytes(tensor)


class Elements:
    """A set of tensor elements, each counted once however many tensors or slices show it."""

    def __init__(self) -> None:
        # Not tensors, which would have no memory either.
        self._seen: dict[int, np.ndarray | None] = {}
        # Held, so that no other storage takes its place.
        self._shown: dict[int, Tensor] = {}

    def add(self, tensor: Tensor) -> None:
        """Adds the elements of a tensor or of a slice of one."""
        key, count = storage_of(tensor), tensor.untyped_storage().nbytes() // tensor.element_size()
        self._shown.setdefault(key, tensor)
        if key in self._seen and self._seen[key] is None:
            return
        if tensor.numel() == count and tensor.is_contiguous():
            self._seen[key] = None
            return
        seen = self._seen.setdefault(key, np.zeros(count, dtype=bool))
        assert seen is not None
        # What is expanded shows one element many times.
        shape = [size if stride else min(size, 1) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
        np.lib.stride_tricks.as_strided(seen[tensor.storage_offset() :], shape, tensor.stride())[...] = True

    def bytes(self) -> int:
        """Bytes of all of them."""
        found = 0
        for key, seen in self._seen.items():
            shown = self._shown[key]
            found += bytes_behind(shown) if seen is None else int(seen.sum()) * element_bytes(shown)
        return found


def new_bytes(made: Any, given: Any) -> int:
    """Bytes of the tensors in `made` that are neither those in `given` nor views of them."""
    known, found = storages_of(given), Elements()
    with torch._C.DisableTorchFunction():
        for tensor in tensors(made):
            if storage_of(tensor) not in known:
                found.add(tensor)
        return found.bytes()


class Reads:
    """The elements of given storages that operations touch; to take a view or a shape touches none.

    A slice counts as the slice, and an operation on the whole tensor as the whole of it.
    """

    def __init__(self, given: set[int]) -> None:
        self._given = given
        self.touched = Elements()

    def note(self, operation: Operation) -> None:
        """Adds what one operation reads."""
        inputs, outputs = operation.given, operation.made
        known = storages_of(inputs)
        if known.isdisjoint(self._given):
            return
        given = [tensor for tensor in inputs if storage_of(tensor) in self._given]
        views_only = bool(outputs) and all(storage_of(tensor) in known for tensor in outputs)
        is_view = views_only and not operation.function._schema.is_mutable
        if not is_view and operation.function.overloadpacket.__name__ not in SHAPE_ONLY:
            for tensor in given:
                self.touched.add(tensor)


def product_flops(run: Callable[[], Any]) -> tuple[int, int]:
    """Counts (all matrix products, those between activations: attention scores and values); convolutions are neither."""
    # It loads Triton, where that is installed.
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        run()
    counted = {str(operation): n for operation, n in counter.get_flop_counts().get("Global", {}).items()}
    products = {operation: n for operation, n in counted.items() if "convolution" not in operation}
    pairs = sum(n for operation, n in products.items() if any(word in operation for word in PAIR_PRODUCTS))
    return sum(products.values()), pairs


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """The gradient of every parameter by name, zeros where there is none; the model's own `.grad` stays as it is."""
    named = dict(model.named_parameters())
    if not named:
        return {}
    names, parameters = zip(*named.items(), strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return {n: torch.zeros_like(p) if g is None else g for n, p, g in zip(names, parameters, found, strict=True)}


def storage_bytes(found: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages behind these tensors."""
    return sum({storage_of(tensor): bytes_behind(tensor) for tensor in found}.values())


@contextmanager
def saved_for_backward() -> Iterator[list[Tensor]]:
    """Collects the tensors that autograd saves for the backward pass within the block."""
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


def saved_bytes(run: Callable[[], Any], known: Callable[[Any], Iterable[Tensor]]) -> int:
    """Bytes of the distinct storages that autograd saves for the backward pass, other than those of known tensors.

    Args:
        run: what is measured.
        known: given what `run` returned, the parameters, inputs and outputs that are alive anyway.
    """
    with saved_for_backward() as saved:
        result = run()
    alive = {storage_of(tensor) for tensor in known(result)}
    return storage_bytes(tensor for tensor in saved if storage_of(tensor) not in alive)
