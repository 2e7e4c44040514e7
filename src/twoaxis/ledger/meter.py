"""The meter: runs a part of a model on tensors without memory, in the engine and precision that will run, and watches it.

Everything depends on shapes and dtypes alone. So no memory is declared: states, saved activations, traffic and caches of any
mixer are what the meter finds.

Letters: B batch, T position, D width.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from typing import Any, Literal, ParamSpec, TypeVar, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from twoaxis.core.errors import ConfigError, problem
from twoaxis.core.measure import (
    NOTHING,
    Operation,
    Operations,
    Reads,
    counted_as,
    element_bytes,
    new_bytes,
    saved_for_backward,
    storage_bytes,
    storage_of,
    storages_of,
    tensors,
)
from twoaxis.ops.precision import plain_forms

_CONSTRUCTORS = frozenset(_device_constructors())

P = ParamSpec("P")
R = TypeVar("R")

DTYPES = {1: torch.bfloat16, 2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
"""Of numbers of the model, by their bytes; PyTorch computes in no dtype of one byte, so bfloat16 runs and is counted as one."""

ONE_BYTE = {torch.bfloat16: torch.float8_e4m3fn}
"""What such a number is counted as; statistics stay in float32, and positions in int64."""

Mode = Literal["eager", "autocast", "compiled"]
"""What runs: the hand-written engines; the same with float32 weights under bfloat16 autocast; the plain forms that
`torch.compile` takes. What a compiler fuses or recomputes is not measured, so `compiled` is an upper bound of saved bytes.
Kernels are not measured either: PyTorch runs in their place, which saves about as much or more."""


def measured_once(maxsize: int) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """An `lru_cache` that keeps the types of arguments, for configurations are hashable although type checkers doubt it."""
    return lambda function: cast("Callable[P, R]", lru_cache(maxsize)(function))


@dataclass(frozen=True)
class Kernels:
    """Operations that move something, each a kernel where nothing is compiled.

    Attributes:
        count: of operations.
        bytes: that they read and write.
    """

    count: int = 0
    bytes: int = 0

    def __add__(self, other: "Kernels") -> "Kernels":
        return Kernels(self.count + other.count, self.bytes + other.bytes)


def measured_dtype(mode: Mode, element_bytes: int) -> torch.dtype:
    """Returns the dtype of a model whose numbers have this many bytes.

    Raises:
        ConfigError: engines compute in no such dtype.
    """
    if element_bytes not in DTYPES:
        raise ConfigError(
            problem("bytes of one number", element_bytes, "1, 2, 4 or 8 where memory is measured", "count with 2")
        )
    if element_bytes == 1 and mode == "autocast":
        raise ConfigError(problem("bytes of one number", 1, "2, 4 or 8 under autocast", "count with mode='eager'"))
    return torch.float32 if mode == "autocast" else DTYPES[element_bytes]


@contextmanager
def without_memory(mode: Mode, number_bytes: int = 2) -> Iterator[None]:
    """Makes tensors without memory within the block, and runs engines as this mode does, whatever the caller's modes are.

    Args:
        mode: what runs.
        number_bytes: of one number; with 1 those of bfloat16 are counted as one byte.
    """
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast")
    with torch.inference_mode(False), torch.enable_grad(), autocast, counted_as(ONE_BYTE if number_bytes == 1 else NOTHING):
        if mode == "autocast":
            # The meta device has no autocast, so tensors say that they are on the CPU.
            with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cpu"):
                yield
        else:
            with plain_forms() if mode == "compiled" else nullcontext(), _OnMeta():
                yield


class _OnMeta(TorchFunctionMode):
    """New tensors on the meta device, and attention there as the engine computes it that runs on a CPU, not from its products.

    One mode in place of two, since each looks at every call of PyTorch.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _CONSTRUCTORS:
            return func(*args, **kwargs) if kwargs.get("device") is not None else func(*args, **(kwargs | {"device": "meta"}))
        if func is not torch.nn.functional.scaled_dot_product_attention or args[0].device.type != "meta":
            return func(*args, **kwargs)
        query, mask = args[0], kwargs.get("attn_mask")
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.where(mask, 0.0, -torch.inf).to(query.dtype)
        engine = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        causal = kwargs.get("is_causal", False)
        return engine(*args[:3], 0.0, causal, attn_mask=mask, scale=kwargs.get("scale"))[0]


def placed(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The module, built on the meta device, where the tensors of this block are."""
    device = torch.empty(()).device
    if device.type == "meta":
        return module.to(dtype)
    made = dict[int, Tensor]()

    def there(tensor: Tensor) -> Tensor:
        wanted = dtype if tensor.is_floating_point() else tensor.dtype
        copy = torch.empty(tensor.shape, dtype=wanted, device=device)
        return made.setdefault(id(tensor), nn.Parameter(copy) if isinstance(tensor, nn.Parameter) else copy)

    # Modules cannot move to tensors of another kind by themselves.
    for part in module.modules():
        for table in (part._parameters, part._buffers):
            table |= {name: there(tensor) for name, tensor in table.items() if tensor is not None}
    return module


def leaf(value: Any) -> Any:
    """The tensor as the start of a graph of its own, in the same storage."""
    with torch._C.DisableTorchFunction():
        return value.detach().requires_grad_(value.is_floating_point()) if isinstance(value, Tensor) else value


@dataclass(frozen=True)
class Call:
    """One call that the meter has watched.

    Attributes:
        result: what it has returned.
        read: bytes of elements of its inputs that it depends on, parameters aside, each once.
        written: bytes of elements that it has made and returned, each once.
        saved: what autograd has saved for its backward pass.
        kernels: as PyTorch runs it operation by operation.
    """

    result: Any
    read: int
    written: int
    saved: list[Tensor]
    kernels: Kernels


def watch(
    operation: Callable[..., Any], *given: Any, owned: frozenset[int] = frozenset(), traffic: bool = True, kernels: bool = False
) -> Call:
    """Runs an operation and notes what it does.

    Args:
        operation: called with `given`.
        given: its inputs.
        owned: storages of parameters, which are neither inputs nor outputs.
        traffic: whether what is read and written is counted.
        kernels: whether kernels are counted.
    """
    inputs = storages_of(given)
    reads, counted = Reads(inputs - owned), Kernels()

    def note(each: Operation) -> None:
        nonlocal counted
        if traffic:
            reads.note(each)
        if kernels:
            counted += moved(each) if each.moves else Kernels()

    with saved_for_backward() as saved, Operations(note if traffic or kernels else None):
        result = operation(*given)
    known = inputs | owned
    made = new_bytes([tensor for tensor in tensors(result) if storage_of(tensor) not in known], ()) if traffic else 0
    return Call(result, reads.touched.bytes(), made, saved, counted)


def moved(operation: Operation) -> Kernels:
    """One kernel, with the bytes of its inputs and its results; what is written in place is read and written."""
    found = (*operation.given, *operation.made)
    return Kernels(1, sum(tensor.numel() * element_bytes(tensor) for tensor in found))


def held_bytes(cache: Any, of_tokens: bool = True) -> int:
    """Bytes that a cache holds for later tokens: what its parts say, else the storages that they keep.

    Args:
        cache: of any mixer.
        of_tokens: whether parts count that hold tokens, which have a length, and not only those that are always as large.
    """
    if not of_tokens and hasattr(cache, "length"):
        return 0
    stated = getattr(cache, "live_bytes", None)
    if stated is not None:
        return stated
    if isinstance(cache, tuple):
        return sum(held_bytes(part, of_tokens) for part in cache)
    if is_dataclass(cache):
        return sum(held_bytes(getattr(cache, field.name), of_tokens) for field in fields(cache))
    return storage_bytes(tensors(cache))
