import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from twoaxis.ops.delta import UpdateRule, delta_write

from .compare import assert_same, normal, output_and_gradients

EPS = 1e-2
RULES: list[UpdateRule] = ["delta", "write_only"]


def loop_write(rule: UpdateRule):  # type: ignore[no-untyped-def]
    def write(x: Tensor, u: Tensor, v: Tensor, beta: Tensor) -> Tensor:
        rows = []
        for x_row, u_row, v_row, b_row in zip(*(z.reshape(-1, z.shape[-1]) for z in (x, u, v, beta)), strict=True):
            k = u_row / (sum(c * c for c in u_row) + EPS**2) ** 0.5
            along = sum(c * d for c, d in zip(k, x_row, strict=True)) if rule == "delta" else 0
            rows.append(x_row + b_row * k * (v_row - along))
        return torch.stack(rows).reshape(x.shape)

    return write


def inputs(shape: list[int], D: int) -> list[Tensor]:
    return [normal(*shape, D), normal(*shape, D, seed=1), normal(*shape, 1, seed=2), normal(*shape, 1, seed=3)]


@pytest.mark.parametrize("rule", RULES)
@given(shape=st.lists(st.integers(1, 3), min_size=1, max_size=2), D=st.integers(1, 5))
@settings(max_examples=15)
def test_equals_loops(rule: UpdateRule, shape: list[int], D: int) -> None:
    assert_same(lambda x, u, v, b: delta_write(x, u, v, b, EPS, rule), loop_write(rule), inputs(shape, D))


@pytest.mark.parametrize("rule", RULES)
def test_gradients_by_finite_differences(rule: UpdateRule) -> None:
    leaves = [tensor.requires_grad_() for tensor in inputs([2], 3)]
    assert torch.autograd.gradcheck(lambda x, u, v, b: delta_write(x, u, v, b, EPS, rule), leaves)


def test_full_gate_replaces_the_component_and_leaves_the_rest() -> None:
    x, u = normal(4, 6), normal(4, 6, seed=1)
    k = u / u.norm(dim=-1, keepdim=True)
    written = delta_write(x, u, torch.full((4, 1), 7.0), torch.ones(4, 1), eps=1e-12)
    torch.testing.assert_close((k * written).sum(-1), torch.full((4,), 7.0, dtype=torch.float64))
    across = torch.eye(6) - k.unsqueeze(-1) * k.unsqueeze(-2)
    torch.testing.assert_close(across @ written.unsqueeze(-1), across @ x.unsqueeze(-1))


@pytest.mark.parametrize("rule", RULES)
def test_zero_update_changes_nothing_and_has_finite_gradients(rule: UpdateRule) -> None:
    x, _, v, beta = (tensor.float() for tensor in inputs([3], 4))
    results = output_and_gradients(lambda x, u, v, b: delta_write(x, u, v, b, 1e-5, rule), (x, torch.zeros(3, 4), v, beta))
    assert torch.equal(results[0], x)
    assert all(result.isfinite().all() for result in results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_and_autocast(dtype: torch.dtype) -> None:
    x, u = (tensor.to(dtype) for tensor in inputs([32], 33)[:2])
    v, beta = (tensor.float() for tensor in inputs([32], 33)[2:])
    exact = delta_write(x.double(), u.double(), v.double(), beta.double(), EPS)
    with torch.autocast("cpu", torch.bfloat16):
        written = delta_write(x, u, v, beta, EPS)
    assert written.dtype == dtype
    # Statistics in float32 leave one rounding of the result, and a few float32 roundings before it.
    budget = torch.finfo(dtype).eps * exact.abs() + 16 * torch.finfo(torch.float32).eps * exact.abs().max()
    assert ((written.double() - exact).abs() <= budget).all()
