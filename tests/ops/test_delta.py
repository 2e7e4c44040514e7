import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from twoaxis.core.errors import ConfigError
from twoaxis.ops.delta import UpdateRule, delta_write, delta_writes
from twoaxis.ops.precision import Impl

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


def channel_inputs(shape: list[int], C: int, D: int) -> list[Tensor]:
    channels = [normal(*shape, D, seed=10 + c) for c in range(C)]
    return [normal(*shape, D, seed=1), normal(C, *shape, seed=2), normal(*shape, seed=3), *channels]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("impl", ["fused", "reference"])
@given(shape=st.lists(st.integers(1, 3), min_size=1, max_size=2), C=st.integers(1, 4), D=st.integers(1, 5))
@settings(max_examples=15)
def test_channels_share_the_direction(impl: Impl, rule: UpdateRule, shape: list[int], C: int, D: int) -> None:
    def together(u: Tensor, v: Tensor, beta: Tensor, *channels: Tensor) -> Tensor:
        return torch.stack(delta_writes(channels, u, v, beta, EPS, rule, impl))

    def matrix(u: Tensor, v: Tensor, beta: Tensor, *channels: Tensor) -> Tensor:
        """The equation of the paper on the state as one D x C matrix."""
        k = (u / (u.square().sum(-1, keepdim=True) + EPS**2).sqrt()).unsqueeze(-1)
        state = torch.stack(channels, dim=-1)
        erased = k.transpose(-1, -2) @ state if rule == "delta" else 0
        written = state + beta[..., None, None] * k @ (v.movedim(0, -1).unsqueeze(-2) - erased)
        return written.movedim(-1, 0)

    assert_same(together, matrix, channel_inputs(shape, C, D))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_channels_round_once(dtype: torch.dtype) -> None:
    u, v, beta, *channels = channel_inputs([16], 3, 33)

    def together(impl: Impl):  # type: ignore[no-untyped-def]
        return lambda u, *channels: torch.stack(delta_writes(channels, u, v.to(wide), beta.to(wide), EPS, "delta", impl))

    wide = torch.float32
    rounded = [tensor.to(dtype) for tensor in (u, *channels)]
    got = output_and_gradients(together("fused"), rounded)
    wide = torch.float64
    exact = output_and_gradients(together("reference"), [tensor.double() for tensor in rounded])
    for ours, truth in zip(got, exact, strict=True):
        budget = (2 * torch.finfo(dtype).eps + 64 * torch.finfo(torch.float32).eps) * truth.abs().max()
        assert (ours.double() - truth).abs().max() <= budget


def test_targets_for_another_number_of_channels() -> None:
    with pytest.raises(ConfigError, match="got 2 channels and 1 targets"):
        delta_writes([normal(1, 2)] * 2, normal(1, 2), normal(1, 1), normal(1), EPS)


def test_an_unused_channel_has_no_part_in_the_gradients() -> None:
    u, v, beta, *channels = (tensor.requires_grad_() for tensor in channel_inputs([3], 2, 4))
    delta_writes(channels, u, v, beta, EPS)[0].sum().backward()
    assert v.grad is not None and torch.equal(v.grad[1], torch.zeros(3, dtype=v.dtype))
    assert channels[1].grad is not None and not channels[1].grad.any()


@pytest.mark.parametrize("impl", ["fused", "reference"])
@pytest.mark.parametrize("rule", RULES)
def test_targets_in_half_precision_are_widened_before_the_gate(rule: UpdateRule, impl: Impl) -> None:
    x, u, v, beta = (tensor.bfloat16() for tensor in inputs([16], 8))
    written = delta_write(x.float(), u.float(), v, beta, EPS, rule, impl)
    wide = delta_write(x.float(), u.float(), v.float(), beta.float(), EPS, rule, impl)
    torch.testing.assert_close(written, wide)
