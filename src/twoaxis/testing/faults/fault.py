"""A planted fault, and the checks that must find it."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from twoaxis.testing.conformance import CheckFailed
from twoaxis.testing.toy import AxisConfig


@dataclass(frozen=True)
class Fault:
    """One planted fault.

    Attributes:
        name: what is wrong.
        faulty: the wrong configuration.
        twin: the same without the fault.
        caught_by: checks that fail on the wrong one and pass on the twin.
        raises: their error, another one than CheckFailed if the model cannot run.
    """

    name: str
    faulty: AxisConfig
    twin: AxisConfig
    caught_by: tuple[str, ...]
    raises: type[Exception] = CheckFailed


class TooSteep(torch.autograd.Function):
    """The identity with a gradient that is 1% too large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Returns a copy."""
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        """Returns 1.01 times the gradient."""
        return grad_outputs[0] * 1.01
