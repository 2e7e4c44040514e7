"""Baselines of a synthetic task: guesses at its answers without the task itself."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from twoaxis.core.errors import DataError
from twoaxis.data.batch import Batch
from twoaxis.ops.cross_entropy import IGNORE


@dataclass(frozen=True)
class AnswerGuesses:
    """Guesses at the answers of validation samples.

    Attributes:
        chance: loss of guessing by the frequency of each answer in training, nats per answer.
        majority: accuracy of the most frequent answer.
        in_context: loss of a uniform guess among the possible answers in the sample before the question; None if an answer is
            not among them.
        answers: in training, a count.
    """

    chance: float
    majority: float
    in_context: float | None
    answers: int


def answer_guesses(train: Iterable[Batch], validation: Iterable[Batch], vocab_size: int) -> AnswerGuesses:
    """Counts the answers of training batches, and scores guesses at those of validation batches.

    Raises:
        DataError: either holds no answer.

    Example:
        >>> import torch
        >>> batch = Batch(torch.tensor([[5, 6, 0]]), torch.tensor([[IGNORE, IGNORE, 6]]), None)
        >>> other = Batch(torch.tensor([[5, 6, 0]]), torch.tensor([[IGNORE, IGNORE, 5]]), None)
        >>> guesses = answer_guesses([batch, batch, other], [batch], vocab_size=8)
        >>> round(guesses.chance, 4), guesses.majority, round(guesses.in_context, 4)
        (1.2993, 1.0, 0.6931)
    """
    counts = np.zeros(vocab_size, dtype=np.int64)
    for batch in train:
        counts += np.bincount(_answers(batch), minlength=vocab_size)
    scored = list(validation)
    answers = np.concatenate([_answers(batch) for batch in scored]) if scored else np.empty(0, dtype=np.int64)
    if not counts.sum() or not len(answers):
        raise DataError("synthetic task: training or validation holds no answer; must hold one; draw more samples")
    # Add-one smoothing, so that no answer is impossible.
    chance = -np.log((counts[answers] + 1) / (counts.sum() + vocab_size)).mean()
    candidates = np.concatenate([_candidates(batch, counts > 0) for batch in scored])
    in_context = None if (candidates == 0).any() else float(np.log(candidates).mean())
    return AnswerGuesses(float(chance), float((answers == counts.argmax()).mean()), in_context, int(counts.sum()))


def _answers(batch: Batch) -> np.ndarray:
    targets = batch.targets.numpy()
    return targets[targets != IGNORE]


def _candidates(batch: Batch, possible: np.ndarray) -> np.ndarray:
    """The number of different possible answers before each answer in its sample; 0 if it is none of them."""
    tokens, targets = batch.tokens.numpy(), batch.targets.numpy()
    found = []
    for row, column in zip(*np.nonzero(targets != IGNORE), strict=True):
        begin = 0
        if batch.documents is not None:
            documents = batch.documents[row].numpy()
            begin = int(np.searchsorted(documents, documents[column]))
        before = np.unique(tokens[row, begin : column + 1])
        candidates = before[possible[before]]
        found.append(len(candidates) if targets[row, column] in candidates else 0)
    return np.asarray(found, dtype=np.int64)
