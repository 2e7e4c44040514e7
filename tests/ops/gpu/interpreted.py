"""What tests of interpreted kernels share: errors that are allowed, and inputs between numbers that are none.

The interpreter truncates where a GPU rounds to 16 bits, so errors of 16-bit results are up to a whole unit here.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

VALUES, GRADIENTS = 1e-6, 1e-5
"""Largest relative errors in float32."""

SIXTEEN_BITS = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 0.0}
"""Twice what truncation to this type gives on the mean."""


def guarded(x: Tensor) -> Tensor:
    """A copy between numbers that are none, so that a load beside it is noticed."""
    room = torch.full((x.numel() + 512,), float("nan"), dtype=x.dtype)
    inside = room[256:-256].view(x.shape)
    inside.copy_(x)
    return inside.detach()


def error(got: Tensor, want: Tensor, floor: float = 0.0) -> float:
    """Relative to the wanted tensor, or to `floor` where that almost cancels."""
    assert got.shape == want.shape
    return float((got.double() - want).norm() / max(float(want.norm()), floor, 1e-30))


def assert_close(got: Sequence[Tensor], want: Sequence[Tensor], dtype: torch.dtype) -> None:
    """A read and its gradients; those of query and scale are in float32 whatever the sources are."""
    assert error(got[0], want[0]) <= VALUES + SIXTEEN_BITS[dtype]
    for index, (ours, exact) in enumerate(zip(got[1:], want[1:], strict=True)):
        assert error(ours, exact, got[0].numel() ** 0.5) <= GRADIENTS + SIXTEEN_BITS[ours.dtype], index


class GivenGradients(TorchDispatchMode):
    """Records which sources come with a gradient of later readers, for every backward pass of a read."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.ops.twoaxis.depth_read_backward.default:
            self.given.append(args[9])
        return func(*args, **(kwargs or {}))
