import pytest
import torch
from torch import Tensor

from twoaxis.ops.blend import blend

from .compare import assert_same, assert_within_rounding, normal


def inputs(B: int, T: int, G: int, K: int) -> list[Tensor]:
    return [normal(B, T, G, K), normal(B, T, G, K, seed=1), normal(B, T, G, seed=2)]


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 3, 2, 5)])
def test_equals_the_weighted_sum(shape: tuple[int, int, int, int]) -> None:
    def weighted(start: Tensor, end: Tensor, gate: Tensor) -> Tensor:
        return (1 - gate[..., None]) * start + gate[..., None] * end

    assert_same(blend, weighted, inputs(*shape))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rounding_and_autocast(dtype: torch.dtype) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert_within_rounding(blend, blend, inputs(2, 3, 2, 17), dtype)
