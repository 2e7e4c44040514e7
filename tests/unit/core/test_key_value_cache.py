"""Rows of a key-value cache: what beams take with them."""

import torch

from twoaxis.core.key_value_cache import KeyValueCache


def test_rows_are_selected_in_storage_of_their_own():
    keys, values = torch.randn(3, 2, 5, 4), torch.randn(3, 2, 5, 4)
    more = torch.randn(2, 2, 1, 4)
    rows = torch.tensor([2, 0])
    for window in (None, 4):
        _, _, cache = KeyValueCache(window).extend(keys, values)
        selected = cache.rows(rows)
        assert (selected.window, selected.length) == (window, cache.length)
        seen, seen_values, _ = selected.extend(more, more)
        assert torch.equal(seen, torch.cat((keys[rows, :, -cache.length :], more), dim=2))
        assert torch.equal(seen_values[:, :, :-1], values[rows, :, -cache.length :])
        nothing = torch.empty(3, 2, 0, 4)
        assert torch.equal(cache.extend(nothing, nothing)[0], keys[:, :, -cache.length :])


def test_rows_of_an_empty_cache():
    assert KeyValueCache(3).rows(torch.tensor([0, 0])).length == 0
