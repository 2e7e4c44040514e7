"""The gate of an n-gram table: both engines, its gradient near a score of zero, and looked-up rows."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from twoaxis.ops.ngram_gate import AtZero, ngram_gate, ngram_scores, signed_root, table_rows

from .compare import assert_same, assert_within_rounding, normal


def loops(query: Tensor, key: Tensor, gain: Tensor, value: Tensor, eps: float) -> Tensor:
    rows = []
    for q, k, v in zip(query.flatten(0, -2), key.flatten(0, -2), value.expand_as(query).flatten(0, -2), strict=True):
        rows.append((q, k, v))
    M = gain.shape[0] if gain.ndim == 2 else 1
    found = []
    for index, (q, k, v) in enumerate(rows):
        own = gain[index % M] if gain.ndim == 2 else gain
        a = (q * own * k).sum() / (k.square().mean() + eps).sqrt() / len(k) ** 0.5
        found.append(v / (1 + torch.exp(-a.sign() * a.abs().sqrt())))
    return torch.stack(found).view_as(query)


@pytest.mark.parametrize("impl", ["fused", "reference"])
@given(B=st.integers(1, 2), T=st.integers(1, 3), M=st.integers(0, 3), D=st.integers(1, 5))
@settings(max_examples=15)
def test_equals_loops_with_any_number_of_streams(impl: str, B: int, T: int, M: int, D: int) -> None:
    streams = (M,) if M else ()
    shared = (1,) if M else ()
    inputs = [
        normal(B, T, *streams, D, seed=1),
        normal(B, T, *streams, D, seed=2),
        normal(*streams, D, seed=3),
        normal(B, T, *shared, D, seed=4),
    ]
    assert_same(lambda q, k, g, v: ngram_gate(q, k, g, v, 0.1, impl=impl), lambda *x: loops(*x, 0.1), inputs)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_engine_rounds_as_the_reference_does(dtype: torch.dtype) -> None:
    key, gain = normal(2, 9, 64, seed=2), normal(64, seed=3)
    # Scores far from 0, where the root magnifies rounding.
    inputs = [normal(2, 9, 64, seed=1) + key * gain, key, gain, normal(2, 9, 64, seed=4)]

    def gate(impl: str):  # type: ignore[no-untyped-def]
        return lambda q, k, g, v: ngram_gate(q, k, g, v, 1e-6, impl=impl)  # type: ignore[arg-type]

    assert_within_rounding(gate("fused"), gate("reference"), inputs, dtype)


def scored(a: float, at_zero: AtZero, impl: str, dtype: torch.dtype, eps: float = 1e-20) -> tuple[float, list[Tensor]]:
    """The gate of a score, and all gradients."""
    key = torch.ones(1, 1, 4, dtype=dtype).requires_grad_()
    query = torch.full((1, 1, 4), a / 2, dtype=dtype).requires_grad_()
    gain, value = torch.ones(4, dtype=dtype).requires_grad_(), torch.ones(1, 1, 4, dtype=dtype).requires_grad_()
    u = ngram_gate(query, key, gain, value, eps, at_zero, impl)  # type: ignore[arg-type]
    return float(u.detach()[0, 0, 0]), list(torch.autograd.grad(u.sum(), (query, key, gain, value)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("impl", ["fused", "reference"])
def test_the_gate_near_a_score_of_zero(impl: str, dtype: torch.dtype) -> None:
    rounding = 1e-6 if dtype == torch.float32 else 1e-12
    for a in (0.0, 1e-7, -1e-7, 1e-6, -1e-6, 2e-6, 1.0):
        for at_zero in ("sign", "copysign"):
            gate, gradients = scored(a, at_zero, impl, dtype)
            root = max(abs(a), 1e-6) ** 0.5 * (0 if a == 0 and at_zero == "sign" else -1 if a < 0 else 1)
            assert gate == pytest.approx(1 / (1 + 2.718281828459045 ** (-root)), rel=rounding)
            assert all(gradient.isfinite().all() for gradient in gradients)
            if abs(a) < 1e-6:
                assert not gradients[0].any()
            # The steepest slope of the gate, just outside: 125.
            assert gradients[0].abs().max() <= 4 * 125.0001 / 2
    assert scored(0.0, "sign", impl, dtype)[0] == 0.5
    assert scored(0.0, "copysign", impl, dtype)[0] == pytest.approx(0.50025, abs=1e-6)
    assert signed_root(torch.tensor([0.0, -0.0], dtype=dtype), "copysign").tolist() == pytest.approx([1e-3, -1e-3])


@pytest.mark.parametrize("impl", ["fused", "reference"])
@pytest.mark.parametrize("eps", [1e-6, 1e-20])
def test_a_key_of_zeros_is_finite_in_float32(impl: str, eps: float) -> None:
    """What a table of zeros makes: the value alone has a gradient."""
    query = normal(1, 3, 8, dtype=torch.float32)
    gain = torch.ones(8).requires_grad_()
    key, value = (torch.zeros(1, 3, 8).requires_grad_() for _ in range(2))
    u = ngram_gate(query, key, gain, value, eps, impl=impl)  # type: ignore[arg-type]
    found = torch.autograd.grad(u.sum(), (key, gain, value))
    assert not u.any() and all(gradient.isfinite().all() for gradient in found)
    assert not found[0].any() and not found[1].any() and torch.equal(found[2], torch.full_like(value, 0.5))


def test_scores_have_the_width_of_statistics() -> None:
    x = normal(1, 1, 8).bfloat16()
    assert ngram_scores(x, x, torch.ones(8, dtype=torch.bfloat16), 1e-6).dtype == torch.float32
    assert signed_root(torch.tensor([-4.0])).item() == -2.0


def test_rows_and_their_gradient_are_those_of_an_embedding() -> None:
    rows = torch.tensor([[[0, 3], [3, 3]], [[1, 0], [4, 3]]])
    assert_same(lambda table: table_rows(table, rows), lambda table: F.embedding(rows, table), [normal(6, 3)])
