"""What a key-value cache holds: after compaction, and of the rows that beams take with them."""

import pytest
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


@pytest.mark.parametrize("window", [1, 2, 4, 65])
@pytest.mark.parametrize("first", [3, 255, 300])
def test_the_last_entries_stay_in_order(first: int, window: int) -> None:
    """Compaction after a long prefill reorders nothing, nor do the copies that make room for later steps."""
    number = torch.arange(first + 200.0).view(1, 1, -1, 1)
    keys, values = number, -number
    cache, start = KeyValueCache(window), 0
    for tokens in (first, *(1,) * 140, 59, 1):
        stop = start + tokens
        seen, seen_values, cache = cache.extend(keys[:, :, start:stop], values[:, :, start:stop])
        past = max(0, start - (window - 1))
        assert torch.equal(seen, keys[:, :, past:stop]) and torch.equal(seen_values, values[:, :, past:stop])
        assert cache.length == min(stop, window - 1)
        start = stop
    nothing = torch.empty(2, 1, 0, 1)
    rows = cache.rows(torch.tensor([0, 0])).extend(nothing, nothing)[1]
    assert torch.equal(rows, values[:, :, start - cache.length :].expand(2, -1, -1, -1))
    joined = KeyValueCache.join([cache, cache.last(1)]).extend(nothing, nothing)[1]
    assert torch.equal(joined[0], values[0, :, start - cache.length :]) and not joined[1, :, :-1].any()
    assert torch.equal(joined[1, :, -1:], values[0, :, start - cache.last(1).length :][:, -1:])
