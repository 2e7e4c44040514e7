"""Baselines: exact on cases small enough to do by hand, equal to plain loops, and probabilities that sum to 1."""

import math
from collections import Counter, defaultdict
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twoaxis.core.errors import DataError
from twoaxis.data import Batch, PackedSampler, TokenShard, counted_baselines, prepare, validation_batches, write_shard
from twoaxis.data.batch import read_batch
from twoaxis.data.counted_baselines import NgramCounts, NgramModel, answer_guesses, discounts, ngram_losses, ngrams
from twoaxis.ops.cross_entropy import IGNORE


def text(*rows: list[int], documents: list[list[int]] | None = None) -> Batch:
    tokens = torch.tensor(rows)
    kinds = None if documents is None else torch.tensor(documents)
    return Batch(tokens[:, :-1], tokens[:, 1:], None if kinds is None else kinds[:, :-1])


def counted(batch: Batch, vocab_size: int, order: int = 3) -> NgramCounts:
    counts = NgramCounts(order, vocab_size)
    counts.add(batch)
    return counts


def plain(grams: list[tuple[int, ...]], order: int, vocab_size: int) -> dict[int, tuple[Counter, tuple[float, ...]]]:
    """Counts and discounts of every order, by loops over dictionaries."""
    levels = {}
    counts = Counter(gram[len(gram) - order :] for gram in grams)
    for n in range(order, 0, -1):
        levels[n] = (counts, (0.0, *discounts(np.array(list(counts.values())))))
        counts = Counter(gram[1:] for gram in counts)
    return levels


def plain_probability(levels: dict[int, tuple[Counter, tuple[float, ...]]], context: tuple[int, ...], w: int, V: int) -> float:
    lower = plain_probability(levels, context[1:], w, V) if context else 1 / V
    counts, D = levels[len(context) + 1]
    total = sum(a for gram, a in counts.items() if gram[:-1] == context)
    if not total:
        return lower
    left = sum(D[min(a, 3)] for gram, a in counts.items() if gram[:-1] == context)
    own = counts.get((*context, w), 0)
    return ((own - D[min(own, 3)]) + left * lower) / total


def test_bigram_by_hand() -> None:
    # a b a b a c: after a comes b twice and c once, after b always a (twice). Bigrams: ab 2, ba 2, ac 1.
    batch = text([0, 1, 0, 1, 0, 2])
    # n1 = 1, n2 = 2: Y = 1/5, D1 = 1 - 2*Y*2/1 = 1/5, D2 = 2 - 3*Y*0/2 = 2, and D3 = D2 since no bigram occurs three times.
    d1, d2 = Fraction(1, 5), Fraction(2)
    assert discounts(np.array([2, 2, 1])) == pytest.approx((float(d1), float(d2), float(d2)))
    # Lower order: b, a and c each follow one token: counts of 1, so n1 = 3, n2 = 0, Y = 1, D1 = 1: all mass goes to 1/3 each.
    lower = Fraction(1, 3)
    left = (d2 + d1) / 3
    model = NgramModel(counted(batch, 3), 2)
    expected = [left * lower, (2 - d2) / 3 + left * lower, (1 - d1) / 3 + left * lower]
    assert model.probabilities(np.array([[0, 0], [0, 1], [0, 2]])) == pytest.approx([float(p) for p in expected])
    assert float(sum(expected)) == 1.0
    # After c nothing was seen: the lower order answers alone.
    assert model.probabilities(np.array([[2, 1]])) == pytest.approx([1 / 3])


def test_unigram_by_hand() -> None:
    # Targets 1 1 1 2: counts 3 and 1, so n1 = 1, n2 = 0: Y = 1, D1 = 1; D2 = D1, and D3 = 3 - 4*1*0/1 = 3 with n3 = 1.
    model = NgramModel(counted(text([0, 1, 1, 1, 2]), 4, order=1), 1)
    assert model.probabilities(np.array([[0], [1], [2], [3]])) == pytest.approx([0.25] * 4)


def test_a_text_without_singletons_keeps_nearly_all_mass() -> None:
    model = NgramModel(counted(text([0, 1] * 500), 2), 2)
    assert model.probabilities(np.array([[0, 1]]))[0] == pytest.approx(1 - 0.1 / 500 / 2, abs=1e-4)


@given(st.lists(st.lists(st.integers(0, 4), min_size=8, max_size=8), min_size=1, max_size=12), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_equal_to_plain_loops_and_sum_to_one(rows: list[list[int]], order: int) -> None:
    V, batch = 5, text(*rows)
    model = NgramModel(counted(batch, V), order)
    levels = plain([tuple(gram) for gram in ngrams(batch, 3, V).tolist()], order, V)
    contexts = [(5, 5), (5, 0), (0, 1), (3, 3), (4, 2)]
    for context in contexts:
        found = model.probabilities(np.array([[*context, w] for w in range(V)]))
        short = context[len(context) - order + 1 :] if order > 1 else ()
        assert found == pytest.approx([plain_probability(levels, short, w, V) for w in range(V)], rel=1e-12)
        assert found.sum() == pytest.approx(1.0, rel=1e-12) and (found > 0).all()


def test_contexts_end_at_documents_and_windows() -> None:
    tokens, numbers = [7, 8, 9, 1, 2, 3], [0, 0, 0, 1, 1, 1]
    targets = torch.tensor([[8, 9, IGNORE, 2, 3]])
    batch = Batch(torch.tensor([tokens[:-1]]), targets, torch.tensor([numbers[:-1]]))
    assert ngrams(batch, 3, vocab_size=10).tolist() == [[10, 7, 8], [7, 8, 9], [10, 1, 2], [1, 2, 3]]
    joined = Batch(batch.tokens, torch.tensor([[8, 9, 1, 2, 3]]), None)
    assert ngrams(joined, 3, vocab_size=10).tolist()[3] == [9, 1, 2]
    assert ngrams(joined, 1, vocab_size=10).tolist() == [[8], [9], [1], [2], [3]]


def test_losses_are_those_of_a_known_source() -> None:
    """A second-order chain: the trigram finds its entropy, the bigram only that of its pairs."""
    generator = np.random.default_rng(0)
    rows = []
    for _ in range(400):
        row = [int(generator.integers(2)), int(generator.integers(2))]
        for _ in range(62):
            flip = generator.random() < 0.1
            row.append((row[-1] ^ row[-2]) ^ int(flip))
        rows.append(row)
    losses = ngram_losses([text(*rows[:300])], [text(*rows[300:])], 2)
    entropy = -(0.1 * math.log(0.1) + 0.9 * math.log(0.9))
    assert losses.tokens == 300 * 63
    assert losses.trigram == pytest.approx(entropy, abs=0.03)
    assert losses.bigram == pytest.approx(math.log(2), abs=0.03) and losses.unigram == pytest.approx(math.log(2), abs=0.03)


def test_counts_do_not_depend_on_when_they_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [text(np.random.default_rng(seed).integers(0, 6, 30).tolist()) for seed in range(5)]
    once = NgramCounts(3, 6)
    often = NgramCounts(3, 6)
    for batch in batches:
        once.add(batch)
    monkeypatch.setattr(counted_baselines, "_MERGE_AT", 1)
    for batch in batches:
        often.add(batch)
    for order in (1, 2, 3):
        for one, other in zip(once.of_order(order), often.of_order(order), strict=True):
            assert one.tolist() == other.tolist()
    recounted: defaultdict[tuple[int, ...], int] = defaultdict(int)
    for batch in batches:
        for gram in ngrams(batch, 2, 6).tolist():
            recounted[tuple(gram)] += 1
    keys, counts = once.of_order(2)
    assert {(key // 7, key % 7): count for key, count in zip(keys.tolist(), counts.tolist(), strict=True)} == recounted


def test_nothing_to_count_is_one_line() -> None:
    empty = Batch(torch.tensor([[1, 2]]), torch.tensor([[IGNORE, IGNORE]]), None)
    with pytest.raises(DataError, match="training text: holds no target"):
        ngram_losses([empty], [text([1, 2, 3])], 4)
    with pytest.raises(DataError, match="validation text: holds no target"):
        ngram_losses([text([1, 2, 3])], [empty], 4)
    with pytest.raises(DataError, match="order=3: must be small enough"):
        NgramCounts(3, 3_000_000)


def test_windows_of_a_run_are_those_that_its_batches_hold(tmp_path: Path) -> None:
    write_shard(tmp_path / "x.tokens", [np.arange(50), np.arange(50)], vocab_size=50)
    shard = TokenShard.open(tmp_path / "x.tokens")
    sampler = PackedSampler(shard, batch_size=3, seq_len=7, seed=4)
    for steps in (1, 2, 4, 5, 50):
        held = {tuple(row) for step in range(steps) for row in sampler.batch(step).tokens.tolist()}
        again = read_batch(shard, sampler.windows(steps), 7, "isolated").tokens.tolist()
        assert {tuple(row) for row in again} == held
        assert len(sampler.windows(steps)) == min(3 * steps, sampler.windows_per_epoch)


def test_guesses_by_hand() -> None:
    _ = IGNORE
    train = Batch(torch.tensor([[3, 4, 0, 0]] * 2), torch.tensor([[_, _, 3, 3], [_, _, 3, 4]]), None)
    asked = Batch(torch.tensor([[3, 4, 0, 0]]), torch.tensor([[_, _, 4, 3]]), None)
    found = answer_guesses([train], [asked], vocab_size=6)
    # Training answers: 3 three times, 4 once; one more of each of six tokens.
    assert found.chance == pytest.approx(-(math.log(2 / 10) + math.log(4 / 10)) / 2)
    assert (found.majority, found.answers) == (0.5, 4)
    assert found.in_context == pytest.approx(math.log(2)), "3 and 4 are shown before either question; 0 is never an answer"


def test_candidates_are_those_of_the_document() -> None:
    _ = IGNORE
    train = Batch(torch.tensor([[3, 4, 5]]), torch.tensor([[3, 4, 5]]), None)
    asked = Batch(torch.tensor([[3, 4, 5, 5]]), torch.tensor([[_, _, _, 5]]), torch.tensor([[0, 0, 1, 1]]))
    assert answer_guesses([train], [asked], 6).in_context == 0.0
    elsewhere = asked._replace(targets=torch.tensor([[_, _, _, 3]]))
    assert answer_guesses([train], [elsewhere], 6).in_context is None, "an answer that is not shown cannot be picked"


def test_no_answer_is_one_line() -> None:
    empty = Batch(torch.tensor([[1]]), torch.tensor([[IGNORE]]), None)
    with pytest.raises(DataError, match="holds no answer"):
        answer_guesses([empty], [empty], 4)


def test_guesses_at_a_task(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Answers of `early_feature` are letters, each as likely as the others, and one of the two that the sample shows."""
    corpus = {"kind": "early_feature", "n_entries": 1, "n_queries": 1, "n_train": 4000, "n_validation": 500}
    data = prepare(corpus, "byte", cache=tmp_path_factory.mktemp("cache"))
    train, validation = (
        validation_batches(shard, 64, 5, 10**9, "joined", data.answer_cues) for shard in (data.train, data.validation)
    )
    found = answer_guesses(train, validation, data.tokenizer.vocab_size)
    assert found.chance == pytest.approx(math.log(26), abs=0.1)
    assert 0 < found.majority < 0.1
    # One letter in 26 stands for both key and value, and is then known.
    assert found.in_context == pytest.approx(math.log(2) * 25 / 26, abs=0.03)
