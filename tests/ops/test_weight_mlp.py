import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from twoaxis.ops.precision import Impl
from twoaxis.ops.weight_mlp import GELUForm, weight_mlp

from .compare import assert_same, assert_within_rounding, normal

EPS = 1e-5
FORMS: tuple[GELUForm, ...] = ("erf", "tanh")
ENGINES: tuple[Impl, ...] = ("fused", "reference")


def inputs(B: int, T: int, D: int, K: int, M: int, gained: bool = True) -> list[Tensor]:
    found = [normal(B, T, D), normal(K, D, seed=1), normal(M, K, seed=2), normal(M, seed=3)]
    return [*found, normal(D, seed=4)] if gained else found


def run(given: list[Tensor]) -> Tensor:
    x, to_hidden, to_weights, bias, *gain = given
    return weight_mlp(x, to_hidden, to_weights, bias, gain[0] if gain else None, EPS)


def numbers(impl: Impl, form: GELUForm) -> Callable[..., Tensor]:
    def run(x: Tensor, a: Tensor, b: Tensor, bias: Tensor, gain: Tensor | None = None) -> Tensor:
        return weight_mlp(x, a, b, bias, gain, EPS, form, impl).to(x.dtype)

    return run


def by_hand(form: GELUForm) -> Callable[..., Tensor]:
    def run(x: Tensor, a: Tensor, b: Tensor, bias: Tensor, gain: Tensor | None = None) -> Tensor:
        normed = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()
        s = torch.einsum("btd,kd->btk", normed if gain is None else normed * gain, a)
        if form == "erf":
            hidden = s * 0.5 * (1 + torch.erf(s / math.sqrt(2)))
        else:
            hidden = 0.5 * s * (1 + torch.tanh(math.sqrt(2 / math.pi) * (s + 0.044715 * s**3)))
        return torch.einsum("btk,mk->mbt", hidden, b) + bias[:, None, None]

    return run


@pytest.mark.parametrize("form", FORMS)
@given(
    B=st.integers(1, 2),
    T=st.integers(1, 3),
    D=st.integers(1, 5),
    K=st.integers(1, 4),
    M=st.integers(1, 5),
    gained=st.booleans(),
)
@settings(max_examples=15)
def test_equals_the_equation(form: GELUForm, B: int, T: int, D: int, K: int, M: int, gained: bool) -> None:
    for impl in ENGINES:
        assert_same(numbers(impl, form), by_hand(form), inputs(B, T, D, K, M, gained))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rounds_as_the_reference(dtype: torch.dtype) -> None:
    assert_within_rounding(numbers("fused", "erf"), numbers("reference", "erf"), inputs(2, 3, 16, 8, 4), dtype)


def test_each_number_is_one_table_in_memory() -> None:
    found = run(inputs(2, 3, 4, 5, 6))
    assert found.shape == (6, 2, 3) and found.is_contiguous()


def test_no_weight_at_first_means_the_bias_for_every_token() -> None:
    x, to_hidden, to_weights, bias = inputs(2, 3, 4, 5, 6, gained=False)
    found = weight_mlp(x, to_hidden, torch.zeros_like(to_weights), bias, None, EPS)
    assert torch.equal(found, bias[:, None, None].expand(6, 2, 3))


def test_under_autocast_everything_stays_wide() -> None:
    given = [tensor.float().requires_grad_() for tensor in inputs(2, 3, 8, 4, 4)]
    expected = run(given)
    wanted = torch.autograd.grad(expected.sum(), given, retain_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = run(given)
        gradients = torch.autograd.grad(found.sum(), given)
    assert torch.equal(found, expected)
    assert all(torch.equal(a, b) for a, b in zip(gradients, wanted, strict=True))


def test_an_input_without_gradient_leaves_the_parameters_theirs() -> None:
    x, *parameters = inputs(1, 2, 3, 4, 5)
    for parameter in parameters:
        parameter.requires_grad_()
    run([x, *parameters]).sum().backward()
    assert x.grad is None and all(parameter.grad is not None for parameter in parameters)
