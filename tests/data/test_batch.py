"""The sampler: what is in a window, the order of an epoch, and resuming exactly."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from twoaxis.core.errors import CheckpointError, ConfigError, DataError
from twoaxis.data.batch import Batch, PackedSampler, Packing, read_batch, validation_batches
from twoaxis.data.shards import TokenShard, write_shard
from twoaxis.ops.cross_entropy import IGNORE


def make_shard(folder: Path, lengths: list[int], name: str = "train.tokens") -> TokenShard:
    """Tokens count up from 0, so that a token is its own position."""
    bounds = np.cumsum([0, *lengths])
    documents = [np.arange(start, stop) for start, stop in itertools.pairwise(bounds)]
    write_shard(folder / name, documents, vocab_size=int(bounds[-1]))
    return TokenShard.open(folder / name)


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> TokenShard:
    return make_shard(tmp_path_factory.mktemp("shard"), [5, 1, 9, 20, 3, 27])


def same(a: Batch, b: Batch) -> bool:
    documents = a.documents is b.documents or (
        a.documents is not None and b.documents is not None and torch.equal(a.documents, b.documents)
    )
    return documents and torch.equal(a.tokens, b.tokens) and torch.equal(a.targets, b.targets)


def test_a_window_by_hand(tmp_path: Path) -> None:
    shard = make_shard(tmp_path, [3, 1, 5])
    batch = read_batch(shard, np.array([0, 1]), 4, "isolated")
    assert batch.tokens.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert batch.targets.tolist() == [[1, 2, IGNORE, IGNORE], [5, 6, 7, 8]]
    assert batch.documents is not None and batch.documents.tolist() == [[0, 0, 0, 1], [0, 0, 0, 0]]
    assert batch.n_targets == 6


def test_joined_windows_are_one_text(tmp_path: Path) -> None:
    batch = read_batch(make_shard(tmp_path, [3, 1, 5]), np.array([0, 1]), 4, "joined")
    assert batch.documents is None
    assert batch.targets.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]


@given(
    seq_len=st.integers(1, 64),
    batch_size=st.integers(1, 5),
    step=st.integers(0, 50),
    packing=st.sampled_from(["isolated", "joined"]),
)
def test_a_batch_equals_a_plain_loop(shard: TokenShard, seq_len: int, batch_size: int, step: int, packing: Packing) -> None:
    batch = PackedSampler(shard, batch_size, seq_len, packing=packing).batch(step)
    assert batch.tokens.shape == batch.targets.shape == (batch_size, seq_len)
    assert batch.tokens.dtype == batch.targets.dtype == torch.int64
    document_of = [number for number, length in enumerate([5, 1, 9, 20, 3, 27]) for _ in range(length)]
    for row in range(batch_size):
        first = int(batch.tokens[row, 0])
        assert first % seq_len == 0
        for index in range(seq_len):
            here = first + index
            crosses = packing == "isolated" and document_of[here] != document_of[here + 1]
            assert batch.tokens[row, index] == here
            assert batch.targets[row, index] == (IGNORE if crosses else here + 1)
            if batch.documents is not None:
                assert batch.documents[row, index] == document_of[here] - document_of[first]


@given(seq_len=st.integers(1, 30), batch_size=st.integers(1, 7), seed=st.integers(0, 2**64))
def test_every_epoch_holds_every_window_once(shard: TokenShard, seq_len: int, batch_size: int, seed: int) -> None:
    sampler = PackedSampler(shard, batch_size, seq_len, seed)
    epoch = sampler.windows_per_epoch
    assert epoch == (len(shard) - 1) // seq_len
    firsts: list[int] = []
    while len(firsts) < 3 * epoch:
        firsts += sampler.next().tokens[:, 0].tolist()
    for begin in range(0, 3 * epoch, epoch):
        assert sorted(firsts[begin : begin + epoch]) == [window * seq_len for window in range(epoch)]


def test_the_order_depends_on_seed_and_epoch(shard: TokenShard) -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return PackedSampler(shard, 64, 1, seed).batch(epoch).tokens[:, 0].tolist()

    orders = [order(0, 0), order(0, 1), order(1, 0), order(1, 1), list(range(64))]
    assert len({tuple(o) for o in orders}) == 5
    assert order(1, 1) == orders[3]


def test_the_order_is_the_same_on_every_machine(shard: TokenShard) -> None:
    sampler = PackedSampler(shard, 8, 8, seed=1234)
    assert (sampler.batch(0).tokens[:, 0] // 8).tolist() == [5, 6, 3, 7, 4, 1, 2, 0]


@given(stop=st.integers(0, 30), more=st.integers(1, 10), batch_size=st.integers(1, 4), seq_len=st.integers(1, 16))
def test_resuming_at_any_step_equals_going_on(shard: TokenShard, stop: int, more: int, batch_size: int, seq_len: int) -> None:
    whole = PackedSampler(shard, batch_size, seq_len, seed=3)
    first = PackedSampler(shard, batch_size, seq_len, seed=3)
    for _ in range(stop):
        assert same(first.next(), whole.next())
    resumed = PackedSampler(TokenShard.open(shard.path), batch_size, seq_len, seed=3)
    resumed.restore(json.loads(json.dumps(first.state())))
    for _ in range(more):
        assert same(resumed.next(), whole.next())


def test_reading_ahead_changes_nothing(shard: TokenShard) -> None:
    sampler = PackedSampler(shard, 2, 4)
    ahead = [sampler.batch(step) for step in (40, 0, 17, 2, 1)]
    assert sampler.step == 0
    assert same(sampler.next(), ahead[1]) and same(sampler.next(), ahead[4]) and same(sampler.next(), ahead[3])


def test_a_state_of_another_run_is_refused_with_both_values(shard: TokenShard, tmp_path: Path) -> None:
    state = PackedSampler(shard, 2, 4, seed=1).state()
    others = {
        r"batch_size=3 in this run, 2 in the checkpoint": PackedSampler(shard, 3, 4, seed=1),
        r"seq_len=5 in this run, 4 in the checkpoint": PackedSampler(shard, 2, 5, seed=1),
        r"seed=2 in this run, 1 in the checkpoint": PackedSampler(shard, 2, 4, seed=2),
        r"packing='joined' in this run, 'isolated' in the": PackedSampler(shard, 2, 4, seed=1, packing="joined"),
        rf"shard='\w+' in this run, '{shard.fingerprint}' in": PackedSampler(make_shard(tmp_path, [30]), 2, 4, seed=1),
    }
    write_shard(tmp_path / "b", [[1] * 9], vocab_size=2, corpus="new", tokenizer="same")
    write_shard(tmp_path / "c", [[1] * 9], vocab_size=2, corpus="", tokenizer="new")
    others["corpus='new' in this run, ''"] = PackedSampler(TokenShard.open(tmp_path / "b"), 2, 4, seed=1)
    others["tokenizer='new' in this run, ''"] = PackedSampler(TokenShard.open(tmp_path / "c"), 2, 4, seed=1)
    for message, sampler in others.items():
        with pytest.raises(CheckpointError, match=message) as caught:
            sampler.restore(state)
        assert "\n" not in str(caught.value) and sampler.step == 0
    with pytest.raises(CheckpointError, match="seed is missing"):
        PackedSampler(shard, 2, 4).restore({key: value for key, value in state.items() if key != "seed"})
    sampler = PackedSampler(shard, 2, 4, seed=1)
    for step in (-1, "x", None, 1.5):
        with pytest.raises(CheckpointError, match=r"step=.*: must be a number from 0"):
            sampler.restore({**state, "step": step})
    assert sampler.step == 0


def test_a_corpus_shorter_than_a_window_names_both_lengths(shard: TokenShard, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"train.tokens has 65 tokens; .* seq_len \+ 1 = 66; .* seq_len to at most 64"):
        PackedSampler(shard, 1, 65)
    assert PackedSampler(shard, 1, 64).windows_per_epoch == 1
    with pytest.raises(DataError, match="has 65 tokens"):
        validation_batches(shard, 1, 65, 10)
    with pytest.raises(DataError, match=r"use more text$"):
        PackedSampler(make_shard(tmp_path, [1]), 1, 1)


def test_impossible_arguments_are_refused(shard: TokenShard) -> None:
    with pytest.raises(ConfigError, match="batch_size=0"):
        PackedSampler(shard, 0, 4)
    with pytest.raises(ConfigError, match="seed=-1"):
        PackedSampler(shard, 1, 4, seed=-1)
    with pytest.raises(ConfigError, match="packing='mixed': must be 'isolated' or 'joined'"):
        PackedSampler(shard, 1, 4, packing="mixed")  # pyright: ignore[reportArgumentType]
    with pytest.raises(DataError, match="seq_len=0"):
        PackedSampler(shard, 1, 0)
    with pytest.raises(ConfigError, match="n_tokens=0"):
        validation_batches(shard, 1, 4, 0)


@given(batch_size=st.integers(1, 9), seq_len=st.integers(1, 20), n_tokens=st.integers(1, 100))
def test_validation_windows_depend_on_the_count_of_tokens_only(
    shard: TokenShard, batch_size: int, seq_len: int, n_tokens: int
) -> None:
    batches = validation_batches(shard, batch_size, seq_len, n_tokens)
    (alone,) = validation_batches(shard, 10**6, seq_len, n_tokens)
    assert torch.equal(torch.cat([batch.tokens for batch in batches]), alone.tokens)
    assert all(len(batch.tokens) == batch_size for batch in batches[:-1])
    firsts = alone.tokens[:, 0].tolist()
    assert firsts == sorted(set(firsts))
    available = (len(shard) - 1) // seq_len
    assert len(firsts) == min(available, -(-n_tokens // seq_len))


def test_validation_windows_are_spread_over_the_shard(shard: TokenShard) -> None:
    (batch,) = validation_batches(shard, 8, 4, 16)
    assert (batch.tokens[:, 0] // 4).tolist() == [0, 4, 8, 12]


@pytest.mark.parametrize("packing", ["isolated", "joined"])
def test_micro_batches_are_the_batch(shard: TokenShard, packing: Packing) -> None:
    batch = PackedSampler(shard, 5, 4, packing=packing).next()
    parts = batch.micro_batches(2)
    assert [len(part.tokens) for part in parts] == [2, 2, 1]
    assert sum(part.n_targets for part in parts) == batch.n_targets
    documents = None if packing == "joined" else torch.cat([part.documents for part in parts if part.documents is not None])
    joined = Batch(torch.cat([part.tokens for part in parts]), torch.cat([part.targets for part in parts]), documents)
    assert same(joined, batch)
    assert same(batch.to("cpu"), batch)
