import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from twoaxis.core.errors import ConfigError
from twoaxis.core.measure import saved_bytes
from twoaxis.model.block import RMSNorm
from twoaxis.ops.norm import inverse_rms, layer_norm, rms_norm
from twoaxis.ops.precision import Impl, check_impl

from .compare import assert_same, assert_within_rounding, normal, output_and_gradients

EPS = 1e-3
IMPLS: list[Impl] = ["fused", "reference"]


def loop_norm(x: Tensor, gain: Tensor) -> Tensor:
    rows = [row / (sum(v * v for v in row) / len(row) + EPS) ** 0.5 * gain for row in x.reshape(-1, x.shape[-1])]
    return torch.stack(rows).reshape(x.shape)


def loop_inverse(x: Tensor) -> Tensor:
    rows = [(sum(v * v for v in row) / len(row) + EPS) ** -0.5 for row in x.reshape(-1, x.shape[-1])]
    return torch.stack(rows).reshape(x.shape[:-1])


@pytest.mark.parametrize("impl", IMPLS)
@given(shape=st.lists(st.integers(1, 3), min_size=0, max_size=2), D=st.integers(1, 5))
@settings(max_examples=20)
def test_equals_loops(impl: Impl, shape: list[int], D: int) -> None:
    x, gain = normal(*shape, D), normal(D, seed=1)
    assert_same(lambda x, g: rms_norm(x, g, EPS, impl), loop_norm, (x, gain))
    torch.testing.assert_close(inverse_rms(x, EPS), loop_inverse(x), rtol=1e-14, atol=0)


def loop_layer_norm(x: Tensor) -> Tensor:
    centred = [row - sum(row) / len(row) for row in x.reshape(-1, x.shape[-1])]
    return torch.stack([row / (sum(v * v for v in row) / len(row) + EPS) ** 0.5 for row in centred]).reshape(x.shape)


@pytest.mark.parametrize("impl", IMPLS)
@given(shape=st.lists(st.integers(1, 3), min_size=0, max_size=2), D=st.integers(1, 5))
@settings(max_examples=20)
def test_layer_norm_equals_loops(impl: Impl, shape: list[int], D: int) -> None:
    assert_same(lambda x: layer_norm(x, EPS, impl), loop_layer_norm, (normal(*shape, D),))


@pytest.mark.parametrize("impl", IMPLS)
def test_layer_norm_with_gain_and_bias(impl: Impl) -> None:
    x, gain, bias = normal(2, 3, 5), normal(5, seed=1), normal(5, seed=2)
    plain = layer_norm(x, EPS)

    def affine(x: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
        return layer_norm(x, EPS, impl, gain, bias)

    torch.testing.assert_close(affine(x, gain, bias), plain * gain + bias, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(layer_norm(x, EPS, impl, gain), plain * gain, rtol=1e-14, atol=1e-14)
    assert torch.autograd.gradcheck(affine, [each.requires_grad_() for each in (x, gain, bias)])
    assert torch.autograd.gradcheck(lambda x, gain: layer_norm(x, EPS, impl, gain), (x, gain))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_norm_with_gain_and_bias_rounds_once(dtype: torch.dtype) -> None:
    inputs = (normal(64, 33), normal(33, seed=1), normal(33, seed=2))
    assert_within_rounding(
        lambda x, g, b: layer_norm(x, EPS, "fused", g, b), lambda x, g, b: layer_norm(x, EPS, "reference", g, b), inputs, dtype
    )
    narrow = [each.to(dtype).requires_grad_() for each in inputs]
    assert saved_bytes(lambda: layer_norm(narrow[0], EPS, "fused", *narrow[1:]), lambda made: (*narrow, made)) == 2 * 64 * 4


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("gain", [None, normal(5, seed=1)], ids=["bare", "gain"])
def test_a_constant_factor_scales_result_and_gradients(impl: Impl, gain: Tensor | None) -> None:
    inputs = [normal(2, 3, 5), *(() if gain is None else (gain,))]

    def scaled(x: Tensor, *gain: Tensor) -> Tensor:
        return rms_norm(x, gain[0] if gain else None, EPS, impl, scale=0.3)

    def expected(x: Tensor, *gain: Tensor) -> Tensor:
        return 0.3 * rms_norm(x, gain[0] if gain else None, EPS, "reference")

    assert_same(scaled, expected, inputs)
    with torch.no_grad():
        torch.testing.assert_close(scaled(*inputs), expected(*inputs), rtol=1e-14, atol=0)
    assert torch.autograd.gradcheck(scaled, [each.clone().requires_grad_() for each in inputs])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_constant_factor_rounds_once_and_saves_nothing(dtype: torch.dtype) -> None:
    inputs = (normal(64, 33), normal(33, seed=1))
    assert_within_rounding(
        lambda x, g: rms_norm(x, g, EPS, scale=0.3), lambda x, g: rms_norm(x, g, EPS, "reference", 0.3), inputs, dtype
    )
    narrow, gain = (each.to(dtype).requires_grad_() for each in inputs)
    assert saved_bytes(lambda: rms_norm(narrow, gain, EPS, scale=0.3), lambda made: (narrow, gain, made)) == 64 * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_norm_rounds_once_and_keeps_its_input_as_it_is(dtype: torch.dtype) -> None:
    x = normal(64, 33)
    assert_within_rounding(lambda x: layer_norm(x, EPS), lambda x: layer_norm(x, EPS, "reference"), (x,), dtype)
    narrow = x.to(dtype).requires_grad_()
    # A mean and a factor of each row.
    assert saved_bytes(lambda: layer_norm(narrow, EPS), lambda made: (narrow, made)) == 2 * 64 * 4


@pytest.mark.parametrize("impl", IMPLS)
def test_gradients_by_finite_differences(impl: Impl) -> None:
    x, gain = normal(2, 3, 5).requires_grad_(), normal(5, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, g: rms_norm(x, g, EPS, impl), (x, gain))
    assert not inverse_rms(x, EPS).requires_grad


@pytest.mark.parametrize("impl", IMPLS)
def test_no_gain_is_a_gain_of_one(impl: Impl) -> None:
    x, ones = normal(2, 3, 5), torch.ones(5, dtype=torch.float64)
    assert_same(lambda x: rms_norm(x, None, EPS, impl), lambda x: loop_norm(x, ones), (x,))
    assert torch.autograd.gradcheck(lambda x: rms_norm(x, None, EPS, impl), (x.requires_grad_(),))
    with torch.no_grad():
        torch.testing.assert_close(rms_norm(x, None, EPS, impl), loop_norm(x, ones), rtol=1e-14, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_gain_rounds_once_and_keeps_one_number_per_row(dtype: torch.dtype) -> None:
    x = normal(64, 33)
    assert_within_rounding(lambda x: rms_norm(x, None, EPS), lambda x: rms_norm(x, None, EPS, "reference"), (x,), dtype)
    narrow = x.to(dtype).requires_grad_()
    assert saved_bytes(lambda: rms_norm(narrow, None, EPS), lambda made: (narrow, made)) == 64 * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding(dtype: torch.dtype) -> None:
    inputs = (normal(64, 33), normal(33, seed=1))
    assert_within_rounding(
        lambda x, g: rms_norm(x, g, EPS, "fused"), lambda x, g: rms_norm(x, g, EPS, "reference"), inputs, dtype
    )


@pytest.mark.parametrize("impl", IMPLS)
def test_small_variance_in_bfloat16(impl: Impl) -> None:
    # Case A07: an eps taken from bfloat16's resolution makes this 1.8 times too small.
    x = 0.058 * torch.randn(2, 4, 1, 32, generator=torch.Generator().manual_seed(42))
    norm = RMSNorm(32, eps=1e-6)
    assert norm.eps == 1e-6
    wide, narrow = (rms_norm(v, torch.ones(32, dtype=v.dtype), norm.eps, impl) for v in (x, x.bfloat16()))
    assert narrow.dtype == torch.bfloat16
    assert (wide - narrow.float()).abs().max() < 0.02


@pytest.mark.parametrize("impl", IMPLS)
def test_extreme_rows_stay_finite(impl: Impl) -> None:
    for x in (torch.zeros(2, 4), torch.full((2, 4), 1e18), torch.full((2, 4), 1e-30)):
        for result in output_and_gradients(lambda x, g: rms_norm(x, g, 1e-6, impl), (x, torch.ones(4))):
            assert result.isfinite().all()


@pytest.mark.parametrize("impl", IMPLS)
def test_autocast_changes_nothing(impl: Impl) -> None:
    inputs = (normal(3, 8, dtype=torch.float32), normal(8, seed=1, dtype=torch.float32))
    plain = output_and_gradients(lambda x, g: rms_norm(x, g, EPS, impl), inputs)
    with torch.autocast("cpu", torch.bfloat16):
        cast = output_and_gradients(lambda x, g: rms_norm(x, g, EPS, impl), inputs)
    assert all(torch.equal(a, b) for a, b in zip(plain, cast, strict=True))


def test_statistics_of_bfloat16_are_float32() -> None:
    assert inverse_rms(normal(2, 8, dtype=torch.bfloat16), EPS).dtype == torch.float32


def test_unknown_engine() -> None:
    with pytest.raises(ConfigError, match=r"^unknown impl 'fusd'; did you mean 'fused'\?$"):
        check_impl("fusd")
