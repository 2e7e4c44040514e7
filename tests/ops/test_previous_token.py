import torch
from hypothesis import given
from hypothesis import strategies as st

from twoaxis.core.layout import PADDING
from twoaxis.ops.causal_conv import previous_token

from .compare import normal


@given(st.data())
def test_equals_a_loop_however_the_row_is_cut(data: st.DataObject) -> None:
    tokens = data.draw(st.integers(1, 7))
    ids = st.lists(st.integers(PADDING, 1), min_size=tokens, max_size=tokens)
    documents = data.draw(st.none() | st.lists(ids, min_size=2, max_size=2).map(torch.tensor))
    x = normal(2, tokens, 3)
    expected = torch.zeros_like(x)
    for b in range(2):
        for t in range(1, tokens):
            if documents is None or documents[b, t] == documents[b, t - 1]:
                expected[b, t] = x[b, t - 1]
    cut = data.draw(st.integers(0, tokens))
    parts = []
    for start, stop in ((0, cut), (cut, tokens)):
        if start < stop:
            seen = None if documents is None else documents[:, max(0, start - 1) : stop]
            parts.append(previous_token(x[:, start:stop], x[:, :start][:, -1:], seen))
    assert torch.equal(torch.cat(parts, dim=1), expected)
