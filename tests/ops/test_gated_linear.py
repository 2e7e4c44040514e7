import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from twoaxis.ops.gated_linear import silu_gate
from twoaxis.ops.precision import Impl

from .compare import assert_same, assert_within_rounding, normal

IMPLS: list[Impl] = ["fused", "reference"]


def loop_gate(x: Tensor) -> Tensor:
    F = x.shape[-1] // 2
    rows = [[row[i] / (1 + torch.exp(-row[i])) * row[F + i] for i in range(F)] for row in x.reshape(-1, 2 * F)]
    return torch.stack([torch.stack(row) for row in rows]).reshape(*x.shape[:-1], F)


@pytest.mark.parametrize("impl", IMPLS)
@given(shape=st.lists(st.integers(1, 3), min_size=1, max_size=2), F=st.integers(1, 5))
@settings(max_examples=15)
def test_equals_loops(impl: Impl, shape: list[int], F: int) -> None:
    assert_same(lambda x: silu_gate(x, impl), loop_gate, (normal(*shape, 2 * F),))


@pytest.mark.parametrize("impl", IMPLS)
def test_gradients_by_finite_differences(impl: Impl) -> None:
    assert torch.autograd.gradcheck(lambda x: silu_gate(x, impl), (normal(2, 3, 6).requires_grad_(),))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding(dtype: torch.dtype) -> None:
    assert_within_rounding(lambda x: silu_gate(x), lambda x: silu_gate(x, "reference"), (normal(64, 66),), dtype)


def test_the_first_half_is_the_gate() -> None:
    assert silu_gate(torch.tensor([[0.0, 5.0]])).item() == 0
    assert silu_gate(torch.tensor([[5.0, 1.0]])).item() == pytest.approx(5 / (1 + math.exp(-5)))
