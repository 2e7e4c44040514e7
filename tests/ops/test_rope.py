import cmath

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from twoaxis.ops.rope import RotationTable, rotate, rotation

from .compare import normal, output_and_gradients

THETA = 100.0


def turned(x: Tensor, positions: Tensor, theta: float = THETA) -> Tensor:
    return rotate(x, rotation(positions, RotationTable(x.shape[-1], theta), x.dtype))


def loop_turned(x: Tensor, positions: Tensor) -> Tensor:
    B, T, H, K = x.shape
    result = torch.empty_like(x)
    for b in range(B):
        for t in range(T):
            position = int(positions[b % positions.shape[0], t])
            for h in range(H):
                for i in range(K // 2):
                    pair = complex(x[b, t, h, i], x[b, t, h, i + K // 2])
                    pair *= cmath.exp(1j * position * THETA ** (-2 * i / K))
                    result[b, t, h, i], result[b, t, h, i + K // 2] = pair.real, pair.imag
    return result


@given(data=st.data(), B=st.integers(1, 2), T=st.integers(1, 3), H=st.integers(1, 2), half=st.integers(1, 3))
@settings(max_examples=20)
def test_equals_complex_multiplication(data: st.DataObject, B: int, T: int, H: int, half: int) -> None:
    rows = data.draw(st.sampled_from([1, B]))
    positions = torch.tensor(data.draw(st.lists(st.integers(0, 200_000), min_size=rows * T, max_size=rows * T)))
    positions = positions.reshape(rows, T)
    x = normal(B, T, H, 2 * half)
    # The angle of a large position carries the rounding of its frequency.
    torch.testing.assert_close(turned(x, positions), loop_turned(x, positions), rtol=1e-9, atol=1e-9)


def test_gradient_turns_back() -> None:
    x, positions = normal(1, 3, 2, 4), torch.tensor([[0, 5, 9]])
    _, gradient = output_and_gradients(lambda x: turned(x, positions), (x,))
    cotangent = normal(1, 3, 2, 4, seed=99)
    torch.testing.assert_close(turned(gradient, positions), cotangent)


def test_position_zero_is_left_alone() -> None:
    x = normal(1, 1, 2, 4)
    assert torch.equal(turned(x, torch.zeros(1, 1, dtype=torch.int64)), x)


@pytest.mark.parametrize("offset", [1, 1000, 100_000])
def test_products_depend_on_the_difference_of_positions(offset: int) -> None:
    q, k = normal(1, 8, 1, 16), normal(1, 8, 1, 16, seed=1)
    positions = torch.arange(8)[None]

    def scores(shift: int) -> Tensor:
        a, b = (turned(x, positions + shift).squeeze(2) for x in (q, k))
        return a @ b.transpose(1, 2)

    torch.testing.assert_close(scores(0), scores(offset), rtol=1e-9, atol=1e-9)


def test_a_large_position_in_float32() -> None:
    x, position = normal(1, 1, 1, 16), torch.tensor([[100_000]])
    narrow = rotate(x.float(), rotation(position, RotationTable(16, 10_000.0), torch.float32))
    assert narrow.dtype == torch.float32
    # One rounding of the frequency, times the position, is the error of the angle.
    budget = 2 * 100_000 * torch.finfo(torch.float32).eps * x.abs().max()
    assert (narrow.double() - turned(x, position, 10_000.0)).abs().max() < budget


def test_bfloat16_is_turned_in_float32() -> None:
    x, positions = normal(1, 4, 1, 8, dtype=torch.bfloat16), torch.tensor([[0, 7, 70, 700]])
    with torch.autocast("cpu", torch.bfloat16):
        narrow = rotate(x, rotation(positions, RotationTable(8, THETA), torch.float32))
    assert narrow.dtype == torch.bfloat16
    assert torch.equal(narrow, turned(x.float(), positions).bfloat16())
