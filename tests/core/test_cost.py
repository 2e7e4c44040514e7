import pytest

from twoaxis.core.cost import Cost, Shape, visible_pairs
from twoaxis.ops.local_attention import visible


@pytest.mark.parametrize("tokens", [1, 2, 7, 8])
@pytest.mark.parametrize("window", [None, 1, 2, 7, 8, 9])
def test_visible_pairs_are_those_of_the_mask(tokens: int, window: int | None) -> None:
    assert visible_pairs(tokens, window) == int(visible(tokens, tokens, window).sum())


def test_costs_add_field_by_field() -> None:
    total = Cost(1, 2, 3, 4, 5, 6) + Cost(10, 20, 30, 40, 50, 60)
    assert total == Cost(11, 22, 33, 44, 55, 66)
    assert total.flops == 22 + 33 + 44
    assert Shape(batch=2, tokens=5).total_tokens == 10
