from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from twoaxis.ops.gated_read import gated_read
from twoaxis.ops.precision import Impl

from .compare import assert_same, assert_within_rounding, normal

EPS = 1e-5
ENGINES: tuple[Impl, ...] = ("fused", "reference")


def inputs(n: int, R: int, M: int, B: int, T: int, D: int) -> list[Tensor]:
    maps = [normal(n, D), normal(R, n * D, seed=1), normal(n * D, R, seed=2), *([normal(M, n * D, seed=3)] if M else [])]
    return [*maps, *(normal(B, T, D, seed=4 + j) for j in range(n))]


def joined(view: Tensor, products: Tensor | None) -> Tensor:
    return view if products is None else torch.cat((view, products.permute(1, 2, 0).to(view.dtype)), dim=-1)


def read(M: int, impl: Impl) -> Callable[..., Tensor]:
    def run(gain: Tensor, down: Tensor, up: Tensor, *rest: Tensor) -> Tensor:
        extra, streams = (rest[0], rest[1:]) if M else (None, rest)
        return joined(*gated_read(streams, gain, down, up, extra, EPS, impl))

    return run


def side_by_side(M: int) -> Callable[..., Tensor]:
    def run(gain: Tensor, down: Tensor, up: Tensor, *rest: Tensor) -> Tensor:
        extra, streams = (rest[0], rest[1:]) if M else (None, rest)
        n, x = len(streams), torch.stack(streams, dim=-2)
        y = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * gain
        flat = y.flatten(-2)
        hidden = torch.nn.functional.silu(flat @ down.T / n)
        gate = torch.sigmoid(hidden @ up.T).view_as(y)
        products = None if extra is None else (flat @ extra.T / n).permute(2, 0, 1)
        return joined((gate * y).mean(-2), products)

    return run


@given(
    n=st.integers(1, 3), R=st.integers(1, 3), M=st.integers(0, 2), B=st.integers(1, 2), T=st.integers(1, 3), D=st.integers(1, 4)
)
@settings(max_examples=15)
def test_equals_the_streams_side_by_side(n: int, R: int, M: int, B: int, T: int, D: int) -> None:
    for impl in ENGINES:
        assert_same(read(M, impl), side_by_side(M), inputs(n, R, M, B, T, D))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rounds_as_the_reference(dtype: torch.dtype) -> None:
    assert_within_rounding(read(2, "fused"), read(2, "reference"), inputs(2, 3, 2, 2, 3, 8), dtype)


def test_without_the_products_nothing_flows_from_them() -> None:
    gain, down, up, extra, *streams = (tensor.requires_grad_() for tensor in inputs(2, 3, 2, 1, 2, 4))
    view, _ = gated_read(streams, gain, down, up, extra, EPS)
    view.sum().backward()
    assert extra.grad is not None and torch.equal(extra.grad, torch.zeros_like(extra))
