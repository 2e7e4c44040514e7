"""Shapes are checked at run time where mixers are tested: of functions, and of dataclasses that hold tensors."""

import beartype
import jaxtyping
import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from twoaxis import TokenLayout
from twoaxis.ops.norm import rms_norm

from ..shape_checks import checked_if_of_shapes


def test_a_wrong_shape_is_an_error() -> None:
    with pytest.raises(jaxtyping.TypeCheckError, match="TokenLayout"):
        TokenLayout(torch.zeros(3, dtype=torch.long))  # without a batch
    rms_norm(torch.zeros(2, 3), torch.zeros(3), 1e-6)
    for _ in range(2):
        with pytest.raises(jaxtyping.TypeCheckError, match="rms_norm"):
            rms_norm(torch.zeros(2, 3), torch.zeros(4), 1e-6)  # another width


def test_arguments_of_one_kind_are_checked_once() -> None:
    def every_other(x: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
        return x[::step]

    checked, step = checked_if_of_shapes(every_other, typechecker=beartype.beartype), 1
    assert checked(torch.ones(4)).shape == (4,)
    step = 2
    assert checked(torch.zeros(4)).shape == (2,)
    for x in (torch.ones(5), torch.ones(4, dtype=torch.float64)):
        with pytest.raises(jaxtyping.TypeCheckError, match="every_other"):
            checked(x)


@pytest.mark.parametrize(
    ("known", "other"),
    [(1, 2), (1, "1"), ((1, 2), ((1,), 2)), ({"a": 1}, {"b": 1}), (None, 1), (torch.nn.Linear(1, 2), torch.nn.Linear(1, 3))],
)
def test_arguments_of_another_kind_are_checked(known: object, other: object) -> None:
    def returned(x: Float[Tensor, " N"], y: object) -> Float[Tensor, " N"]:
        return x[::step]

    checked, step = checked_if_of_shapes(returned, typechecker=beartype.beartype), 1
    checked(torch.ones(4), known)
    step = 2
    assert checked(torch.ones(4), known).shape == (2,)
    with pytest.raises(jaxtyping.TypeCheckError, match="returned"):
        checked(torch.ones(4), other)


def test_functions_without_declared_shapes_are_left_alone() -> None:
    def doubled(x: int) -> int:
        return 2 * x

    def tripled(x: Tensor) -> Tensor:
        return 3 * x

    for function in (doubled, tripled):
        assert checked_if_of_shapes(function, typechecker=None) is function
        assert checked_if_of_shapes(typechecker=None)(function) is function
