import pytest
import torch
from torch import Tensor

from twoaxis.ops.precision import Impl
from twoaxis.ops.scores import linear_scores

from .compare import assert_same, assert_within_rounding, normal


def scores(impl: Impl):  # type: ignore[no-untyped-def]
    # In the dtype of x, which the helpers compare; the scores themselves are in that of statistics.
    return lambda x, weight: linear_scores(x, weight, impl).to(x.dtype)


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 7)])
@pytest.mark.parametrize("rows", [1, 4])
def test_equals_rows(shape: tuple[int, int, int], rows: int) -> None:
    def one_by_one(x: Tensor, weight: Tensor) -> Tensor:
        return torch.stack([(x * row).sum(-1) for row in weight])

    inputs = [normal(*shape), normal(rows, shape[-1], seed=1)]
    assert_same(scores("fused"), one_by_one, inputs)
    assert_same(scores("reference"), one_by_one, inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rounding_and_autocast(dtype: torch.dtype) -> None:
    inputs = [normal(2, 3, 33), normal(4, 33, seed=1)]
    with torch.autocast("cpu", torch.bfloat16):
        assert linear_scores(inputs[0].to(dtype), inputs[1].to(dtype)).dtype == torch.float32
        assert_within_rounding(scores("fused"), scores("reference"), inputs, dtype)
