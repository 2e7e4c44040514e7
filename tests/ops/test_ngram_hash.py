"""Hashes of n-grams: numbers that never change, and windows that end where they must."""

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from twoaxis.core.errors import ConfigError
from twoaxis.core.layout import PADDING
from twoaxis.ops import ngram_hash
from twoaxis.ops.ngram_hash import (
    NOTHING,
    RowHash,
    bigram_rows,
    distinct_primes,
    half_range,
    pcg64_multipliers,
    sign_table,
    splitmix64,
    splitmix64_multipliers,
    token_window,
)

DEEPSEEK_IDS, QWEN_IDS = 99092, 248320


def test_multipliers_are_the_same_everywhere() -> None:
    """At the sizes of DeepSeek-V4.1, blocks 1 and 14, and of Qwen3.8: golden numbers."""
    first, later = (pcg64_multipliers(0, layer, 4, DEEPSEEK_IDS) for layer in (1, 14))
    assert first == (76632096046245, 4839876093313, 35959672319349, 73987337458391)
    assert later == (67716810739261, 51510806800915, 30921347202721, 82619226485591)
    assert splitmix64_multipliers(1234, 0, 3, QWEN_IDS) == (23703573157769, 20109073645365, 8052911324071)
    digest = hashlib.sha256(sign_table(8192, 768).numpy().tobytes()).hexdigest()
    assert digest.startswith("50dea011b5df16cc")


@given(seed=st.integers(0, 2**40), layer=st.integers(0, 99), ids=st.integers(1, ngram_hash.LARGEST_ID))
def test_multipliers_are_those_of_numpys_generator(seed: int, layer: int, ids: int) -> None:
    half = half_range(ids)
    drawn = np.random.default_rng(seed + 10007 * layer).integers(0, half, size=5)
    assert pcg64_multipliers(seed, layer, 5, ids) == tuple((2 * drawn + 1).tolist())
    largest = max(*pcg64_multipliers(seed, layer, 5, ids), *splitmix64_multipliers(seed, layer, 5, ids))
    assert largest % 2 == 1 and largest * (ids - 1) < 2**63


def test_a_draw_above_the_last_multiple_of_the_bound_is_drawn_again() -> None:
    bound = 2**63 + 1
    source, drawn = np.random.PCG64(3), np.random.default_rng(3).integers(0, bound, size=20, dtype=np.uint64)
    assert [ngram_hash._below(source, bound) for _ in range(20)] == drawn.tolist()


def test_splitmix64_is_the_published_generator() -> None:
    """The first outputs of seed 1234567, whose state grows by the golden gamma."""
    states = np.array([(1234567 + k * 0x9E3779B97F4A7C15) % 2**64 for k in range(3)], dtype=np.uint64)
    assert splitmix64(states).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_no_table_has_the_prime_of_another() -> None:
    assert distinct_primes(((1021, 2),) * 2) == (1021, 1031, 1033, 1039)
    assert distinct_primes(((97, 2), (101, 2), (97, 2), (101, 2))) == (97, 101, 103, 107, 109, 113, 127, 131)
    assert distinct_primes(((2, 4),)) == (2, 3, 5, 7)
    deepseek, qwen = distinct_primes(((16_000_000, 8),) * 3), distinct_primes(((20_000_000, 8),) * 2)
    assert (len(set(deepseek)), deepseek[0], sum(deepseek)) == (24, 16000057, 384_006_168)
    assert (qwen[0], sum(qwen)) == (20_000_003, 320_001_446)


def test_tables_of_later_sublayers_take_later_primes() -> None:
    wanted = ((97, 2), (101, 2))
    first, second = (RowHash.of("pcg64", 3, wanted, 5, 47, 1, before) for before in ([], [wanted]))
    assert not set(first.sizes) & set(second.sizes)
    assert first.factors == second.factors
    alike = RowHash.of("splitmix64", 3, wanted, 5, 47, 7, []), RowHash.of("splitmix64", 3, wanted, 5, 47, 1, [])
    assert alike[0] == alike[1]
    assert alike[0].factors != RowHash.of("splitmix64", 3, wanted, 5, 47, 1, [wanted]).factors


def rows_of(window: list[Tensor], one: RowHash) -> list[list[int]]:
    """Python's integers have no width."""
    found = []
    for t in range(window[0].shape[1]):
        mixed, row = int(window[0][0, t]) * one.factors[0], list[int]()
        for n in range(1, one.order):
            mixed ^= int(window[n][0, t]) * one.factors[n]
            row += [mixed % p for p in one.sizes[(n - 1) * one.tables : n * one.tables]]
        found.append(row)
    return found


@given(st.lists(st.integers(0, DEEPSEEK_IDS - 1), min_size=1, max_size=9))
def test_products_are_exact_in_64_bits(ids: list[int]) -> None:
    one = RowHash.of("pcg64", 4, ((16_000_000, 2),) * 3, 0, DEEPSEEK_IDS, 1, [])
    window = token_window(torch.tensor([ids]), len(ids), 4, fill=2)
    assert one.rows(window)[0].tolist() == rows_of(window, one)


def test_the_bigram_hash_wraps_around_as_int32_does() -> None:
    ids = torch.tensor([[2**31 - 1, 50_303, 129_279, 99_999]])
    before = torch.tensor([[NOTHING, 2**31 - 1, 128_000, 0]])
    with np.errstate(over="ignore"):
        mixed = ids.numpy().astype(np.int32) * np.int32(36313) ^ before.numpy().astype(np.int32) * np.int32(27191)
    expected = np.mod(mixed, np.int32(377_279))[0].tolist()
    assert bigram_rows(ids, before, 377_280)[0].tolist() == [377_279, *expected[1:]]


def test_a_sum_that_does_not_fit_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"^rows=2147483647: must be small enough for sums below 2\^63 with ids below 1073741824"
    ):
        RowHash.of("polynomial", 16, ((2**31 - 1, 1),) * 15, 0, 2**30, 0, [])


def test_a_look_back_stops_for_good() -> None:
    ids = torch.tensor([[1, 2, 3, 4, 5, 6]])
    documents = torch.tensor([[0, 0, PADDING, 0, 0, 1]])
    slots = token_window(ids, 6, order=4, fill=9, documents=documents)
    assert torch.stack(slots, dim=-1)[0].tolist() == [
        [1, 9, 9, 9],
        [2, 1, 9, 9],
        [9, 9, 9, 9],
        [4, 9, 9, 9],
        [5, 4, 9, 9],
        [6, 9, 9, 9],
    ]


def test_an_end_belongs_to_the_segment_that_it_ends() -> None:
    ids = torch.tensor([[7, 5, 3, 4, 5, 5, 6]])
    slots = token_window(ids, 7, order=3, fill=0, ends=(5,))
    expected = [[7, 0, 0], [5, 7, 0], [3, 0, 0], [4, 3, 0], [5, 4, 3], [5, 0, 0], [6, 0, 0]]
    assert torch.stack(slots, dim=-1)[0].tolist() == expected


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.integers(2, 5), st.data())
def test_a_window_in_pieces_is_the_whole_one(ids: list[int], order: int, data: st.DataObject) -> None:
    row = torch.tensor([ids])
    whole = torch.stack(token_window(row, len(ids), order, fill=9, ends=(3,)), dim=-1)
    stop = data.draw(st.integers(1, len(ids)))
    start = data.draw(st.integers(0, stop - 1))
    history = row[:, max(0, start - order + 1) : stop]
    piece = token_window(history, stop - start, order, fill=9, ends=(3,))
    assert torch.equal(torch.stack(piece, dim=-1), whole[:, start:stop])
