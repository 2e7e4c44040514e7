import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from twoaxis.core.layout import PADDING, TokenLayout

ROWS = st.integers(1, 8).flatmap(
    lambda T: st.lists(st.lists(st.integers(0, 2), min_size=T, max_size=T), min_size=1, max_size=3)
)


@given(rows=ROWS)
def test_packed_positions_restart_with_each_document(rows: list[list[int]]) -> None:
    expected = []
    for row in rows:
        positions = [0]
        for before, after in itertools.pairwise(row):
            positions.append(positions[-1] + 1 if before == after else 0)
        expected.append(positions)
    layout = TokenLayout.packed(torch.tensor(rows))
    assert layout.positions.tolist() == expected
    assert layout.documents is not None and layout.documents.tolist() == rows


def test_contiguous() -> None:
    layout = TokenLayout.contiguous(3, start=5)
    assert layout.positions.tolist() == [[5, 6, 7]]
    assert layout.documents is None and layout.key_documents(3) is None


def test_left_padded() -> None:
    layout = TokenLayout.left_padded(torch.tensor([2, 4, 0]), 4)
    assert layout.positions.tolist() == [[0, 0, 0, 1], [0, 1, 2, 3], [0, 0, 0, 0]]
    assert layout.documents is not None
    assert layout.documents.tolist() == [[PADDING, PADDING, 0, 0], [0, 0, 0, 0], [PADDING] * 4]


def test_a_part_keeps_absolute_positions() -> None:
    layout = TokenLayout.packed(torch.tensor([[0, 0, 1, 1, 1]])).part(1, 4)
    assert layout.positions.tolist() == [[1, 0, 1]]
    assert layout.documents is not None and layout.documents.tolist() == [[0, 1, 1]]


def test_key_documents_are_the_last_ones() -> None:
    layout = TokenLayout(torch.tensor([[2, 3]]), torch.tensor([[1, 1]])).after(torch.tensor([[0, 1, 1]]))
    for keys, expected in ((5, [0, 1, 1, 1, 1]), (3, [1, 1, 1]), (2, [1, 1])):
        documents = layout.key_documents(keys)
        assert documents is not None and documents.tolist() == [expected]


def test_shared_values_are_made_once_per_layout() -> None:
    layout, made = TokenLayout.contiguous(2), []

    def make() -> int:
        made.append(1)
        return len(made)

    assert [layout.shared("key", make), layout.shared("key", make), layout.shared("other", make)] == [1, 1, 2]
    assert layout.after(None).shared("key", make) == 3, "nothing is shared between layouts"


def test_layouts_are_frozen() -> None:
    with pytest.raises(AttributeError):
        TokenLayout.contiguous(2).documents = None  # type: ignore[misc]
