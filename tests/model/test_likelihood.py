"""Case A20: a continuation's likelihood has one term per token of it, and never two begin tokens."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from twoaxis import DataError, Decoder, DecoderConfig
from twoaxis.model.likelihood import Passage, loglikelihood, loglikelihoods

VOCAB, BEGIN, LONGEST = 6, 0, 8


@pytest.fixture
def bigram() -> tuple[Decoder, Tensor]:
    """A model whose next token depends on the last one alone, with the table of log p[last, next]."""
    sizes = {"vocab_size": VOCAB, "d_model": VOCAB, "n_layers": 1, "max_seq_len": LONGEST, "norm_eps": 1e-14}
    blocks = [[{"kind": "attention", "n_heads": 1, "output_init": "zero"}]]
    model = Decoder.build(DecoderConfig.from_data({**sizes, "tie_embeddings": False, "blocks": blocks})).double()
    with torch.no_grad():
        model.embedding.weight.copy_(torch.eye(VOCAB))
        model.head_weight.copy_(torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1)))
    # Normalising a one-hot vector multiplies it by sqrt(VOCAB).
    return model, torch.log_softmax(model.head_weight.detach().T * math.sqrt(VOCAB), dim=-1)


def by_hand(table: Tensor, tokens: list[int], scored: int) -> float:
    pairs = list(itertools.pairwise(tokens))[-scored:]
    return sum(float(table[last, following]) for last, following in pairs)


@pytest.mark.parametrize("begin_token", [None, BEGIN])
@pytest.mark.parametrize("context", [[1, 2, 3], [BEGIN, 2, 3]])
def test_sums_over_exactly_the_continuation(
    bigram: tuple[Decoder, Tensor], begin_token: int | None, context: list[int]
) -> None:
    model, table = bigram
    found = loglikelihood(model, context, [4, 5], begin_token)
    assert found.tokens == 2
    assert found.nats == pytest.approx(by_hand(table, [*context, 4, 5], 2), rel=1e-9)


def test_a_begin_token_that_is_there_is_not_added_again() -> None:
    sizes = {"vocab_size": VOCAB, "d_model": 8, "n_layers": 2, "max_seq_len": LONGEST}
    model = Decoder.build(DecoderConfig.from_data({**sizes, "blocks": [[{"kind": "attention", "n_heads": 2}, "swiglu"]]}))
    added = loglikelihood(model, [1, 2], [3], BEGIN)
    assert added == loglikelihood(model, [BEGIN, 1, 2], [3], BEGIN) == loglikelihood(model, [BEGIN, 1, 2], [3])
    assert added.nats != loglikelihood(model, [1, 2], [3]).nats
    assert added.nats != loglikelihood(model, [BEGIN, BEGIN, 1, 2], [3]).nats


def test_empty_context(bigram: tuple[Decoder, Tensor]) -> None:
    model, table = bigram
    assert loglikelihood(model, [], [4, 5], BEGIN).nats == pytest.approx(by_hand(table, [BEGIN, 4, 5], 2), rel=1e-9)
    with pytest.raises(DataError, match="context: got no tokens: must be at least one"):
        loglikelihood(model, [], [4, 5])


@pytest.mark.parametrize("length", [1, LONGEST - 1, LONGEST, LONGEST + 1, 3 * LONGEST + 1])
def test_continuations_around_and_beyond_the_window(bigram: tuple[Decoder, Tensor], length: int) -> None:
    model, table = bigram
    continuation = [i % VOCAB for i in range(length)]
    found = loglikelihood(model, [1, 2, 3], continuation)
    assert found.tokens == length
    assert found.nats == pytest.approx(by_hand(table, [1, 2, 3, *continuation], length), rel=1e-9)


def test_empty_continuation(bigram: tuple[Decoder, Tensor]) -> None:
    assert loglikelihood(bigram[0], [1], []) == (0.0, 0, True)


@pytest.mark.parametrize("bad", [-100, -1, VOCAB, 999])
def test_ids_outside_the_vocabulary_are_refused_wherever_they_stand(bigram: tuple[Decoder, Tensor], bad: int) -> None:
    for context, continuation in (([1], [bad]), ([1], [bad, 2]), ([bad], [1]), ([bad], []), ([1], [2] * 20 + [bad])):
        with pytest.raises(DataError, match=rf"token id={bad}: must be in 0\.\.{VOCAB - 1}"):
            loglikelihood(bigram[0], context, continuation)
    with pytest.raises(DataError, match=f"token id={bad}"):
        loglikelihoods(bigram[0], [Passage(torch.tensor([bad]), 0)])


@pytest.mark.parametrize("bad", [2**70, 1.5, None])
def test_ids_that_make_no_tensor_are_refused_in_one_line(bigram: tuple[Decoder, Tensor], bad: Any) -> None:
    allowed = f"in 0..{VOCAB - 1}" if isinstance(bad, int) else f"a whole number in 0..{VOCAB - 1}"
    for context, continuation in (([1], [2, bad]), ([bad], [1]), ([bad], [])):
        with pytest.raises(DataError, match=rf"^token id={bad}: must be {allowed}; use the model's own tokenizer$"):
            loglikelihood(bigram[0], context, continuation)


def test_greedy(bigram: tuple[Decoder, Tensor]) -> None:
    model, table = bigram
    best = int(table[3].argmax())
    assert loglikelihood(model, [3], [best]).greedy
    assert not loglikelihood(model, [3], [(best + 1) % VOCAB]).greedy
