from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from twoaxis.ops.precision import Impl
from twoaxis.ops.scores import row_product, sum_of_rows

from .compare import assert_same, assert_within_rounding, normal, output_and_gradients

IMPLS: list[Impl] = ["fused", "reference"]


def loop(x: Tensor, weight: Tensor) -> Tensor:
    return torch.stack([torch.stack([(row * weight).sum() for row in rows]) for rows in x])


@pytest.mark.parametrize("impl", IMPLS)
@given(B=st.integers(1, 3), T=st.integers(1, 3), D=st.integers(1, 5))
@settings(max_examples=15)
def test_equals_loops(impl: Impl, B: int, T: int, D: int) -> None:
    assert_same(lambda x, w: row_product(x, w, impl), loop, (normal(B, T, D), normal(D, seed=1)))


@pytest.mark.parametrize("impl", IMPLS)
def test_gradients_by_finite_differences(impl: Impl) -> None:
    x, weight = normal(2, 3, 5).requires_grad_(), normal(5, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w: row_product(x, w, impl), (x, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding(dtype: torch.dtype) -> None:
    inputs = (normal(2, 8, 33), normal(33, seed=1))

    def product(impl: Impl) -> Callable[..., Tensor]:
        return lambda x, w: row_product(x, w, impl).to(x.dtype)

    assert_within_rounding(product("fused"), product("reference"), inputs, dtype)


def test_autocast_changes_nothing() -> None:
    inputs = (normal(2, 3, 8, dtype=torch.float32), normal(8, seed=1, dtype=torch.float32))
    plain = output_and_gradients(row_product, inputs)
    with torch.autocast("cpu", torch.bfloat16):
        cast = output_and_gradients(row_product, inputs)
    assert all(torch.equal(a, b) for a, b in zip(plain, cast, strict=True))


def test_sum_of_rows() -> None:
    x, weight = normal(2, 3, 4), normal(2, 3, seed=1)
    torch.testing.assert_close(sum_of_rows(x, weight), torch.einsum("btd,bt->d", x, weight))
