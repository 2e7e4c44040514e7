"""Shapes are checked at run time in tests: of functions, and of dataclasses that hold tensors."""

import jaxtyping
import pytest
import torch

from twoaxis import TokenLayout
from twoaxis.ops.norm import rms_norm

from ..shape_checks import checked_if_of_tensors


def test_a_wrong_shape_is_an_error() -> None:
    with pytest.raises(jaxtyping.TypeCheckError, match="rms_norm"):
        rms_norm(torch.zeros(2, 3), torch.zeros(4), 1e-6)  # another width
    with pytest.raises(jaxtyping.TypeCheckError, match="TokenLayout"):
        TokenLayout(torch.zeros(3, dtype=torch.long))  # without a batch


def test_functions_of_other_things_are_left_alone() -> None:
    def doubled(x: int) -> int:
        return 2 * x

    assert checked_if_of_tensors(doubled, typechecker=None) is doubled
    assert checked_if_of_tensors(typechecker=None)(doubled) is doubled
