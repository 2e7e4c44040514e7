"""Rows that join and leave a running batch go on as they would alone, whatever their mixers carry."""

import pytest
import torch
from torch import Tensor

from twoaxis import DEPTH, LOCAL, SEQUENCE, ConfigError, Decoder
from twoaxis.core.key_value_cache import KeyValueCache
from twoaxis.model import DecoderCache
from twoaxis.model.cache import join_rows, keep_rows
from twoaxis.sequence import AttentionConfig
from twoaxis.testing.toy import toy_decoder, toy_tokens

# On the depth axis only Deep Delta mixes along positions, so that options of the others change nothing in a cache.
CASES = [
    pytest.param(row.example(name), id=f"{row.kind}-{name}")
    for table in (DEPTH, SEQUENCE, LOCAL)
    for row in table
    for place, name in enumerate(row.examples)
    if place == 0 or table is not DEPTH or row.kind == "deep_delta"
]
ATTENTION = AttentionConfig(n_heads=2)
LENGTHS = (9, 2, 5, 1)


class Batch:
    """Rows of a table of tokens in one cache; every step is compared with the row alone."""

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self.tokens = toy_tokens(batch=len(LENGTHS), tokens=24)
        with torch.no_grad():
            self.alone = model(self.tokens)
        self.seen: list[int] = list(LENGTHS)
        self.rows: list[int] = []
        self.cache: DecoderCache | None = None

    def join(self, *rows: int) -> None:
        caches = [] if self.cache is None else [self.cache]
        for row in rows:
            with torch.no_grad():
                logits, cache = self.model(self.tokens[row : row + 1, : self.seen[row]], None, self.model.new_cache())
            self.same(logits[0, -1], row)
            caches.append(cache)
        self.rows += rows
        self.cache = join_rows(caches)

    def keep(self, *places: int) -> None:
        assert self.cache is not None
        self.rows = [self.rows[place] for place in places]
        self.cache = keep_rows(self.cache, torch.tensor(places))

    def step(self, times: int) -> None:
        for _ in range(times):
            following = torch.stack([self.tokens[row, self.seen[row]] for row in self.rows]).unsqueeze(1)
            with torch.no_grad():
                logits, self.cache = self.model(following, None, self.cache)
            for place, row in enumerate(self.rows):
                self.seen[row] += 1
                self.same(logits[place, 0], row)

    def same(self, logits: Tensor, row: int) -> None:
        torch.testing.assert_close(logits, self.alone[row, self.seen[row] - 1], rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("config", CASES)
def test_rows_join_and_leave(config) -> None:
    batch = Batch(toy_decoder(config, n_layers=1))
    batch.join(1)
    batch.step(1)
    batch.join(0, 3)
    batch.step(2)
    batch.keep(2, 0)
    batch.join(2)
    batch.step(1)
    batch.keep(0)
    batch.step(2)
    assert batch.cache is not None
    assert batch.cache.documents is None or batch.cache.documents.min() == -1
    assert batch.cache.length == batch.seen[3]


def test_padding_goes_with_the_row_that_needed_it() -> None:
    batch = Batch(toy_decoder(ATTENTION, n_layers=1))
    batch.join(0, 1)
    assert batch.cache is not None and batch.cache.documents is not None
    assert (batch.cache.length, (batch.cache.documents == -1).sum()) == (9, 7)
    batch.keep(1)
    assert (batch.cache.length, batch.cache.documents) == (2, None)
    keys = batch.cache.sublayers[0][0].mixer.keys
    assert keys.length == 2


def test_rows_of_nothing_are_refused() -> None:
    model = toy_decoder(ATTENTION, n_layers=1)
    for caches in ([], [model.new_cache()]):
        with pytest.raises(ConfigError, match="run the prompts first"):
            join_rows(caches)


def test_joined_keys_stand_at_the_end() -> None:
    caches = []
    for length in (1, 3):
        keys = torch.full((1, 1, length, 2), float(length))
        caches.append(KeyValueCache(4).extend(keys, keys)[2])
    joined = KeyValueCache.join(caches)
    nothing = torch.empty(2, 1, 0, 2)
    seen, values, _ = joined.extend(nothing, nothing)
    assert (joined.window, joined.length) == (4, 3)
    assert seen[:, 0, :, 0].tolist() == values[:, 0, :, 0].tolist() == [[0.0, 0.0, 1.0], [3.0, 3.0, 3.0]]
    assert joined.last(2).length == 2
    assert caches[1].last(9).length == 3
