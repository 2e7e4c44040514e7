"""Guesses at the answers of synthetic tasks."""

import math

import pytest
import torch

from twoaxis.core.errors import DataError
from twoaxis.data import Batch, prepare, validation_batches
from twoaxis.data.chance import answer_guesses
from twoaxis.ops.cross_entropy import IGNORE


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
