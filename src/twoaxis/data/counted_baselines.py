"""Baselines that count training tokens: n-gram models of a text, and guesses at the answers of a synthetic task.

Letters: N n-grams, O order, V vocabulary.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from twoaxis.core.errors import DataError, problem
from twoaxis.data.batch import Batch
from twoaxis.ops.cross_entropy import IGNORE

LEAST_DISCOUNT = 0.1
"""The smallest discount, so that an unseen token has a probability above zero."""

_MERGE_AT = 1 << 22
"""Buffered n-grams that are then merged into the counts."""

_SCORED_AT_ONCE = 1 << 20

Keys = Int[np.ndarray, " N"]


def ngrams(batch: Batch, order: int, vocab_size: int) -> Int[np.ndarray, "N O"]:
    """The tokens before every target that counts, and the target; V replaces a token before the window or the document.

    Example:
        >>> import torch
        >>> ngrams(Batch(torch.tensor([[4, 5, 6]]), torch.tensor([[5, 6, 7]]), None), 3, vocab_size=9).tolist()
        [[9, 4, 5], [4, 5, 6], [5, 6, 7]]
    """
    tokens, targets = batch.tokens.numpy(), batch.targets.numpy()
    columns = [targets]
    for back in range(order - 1):
        column = np.full_like(tokens, vocab_size)
        kept = tokens.shape[1] - back
        column[:, back:] = tokens[:, :kept]
        if batch.documents is not None and back:
            documents = batch.documents.numpy()
            column[:, back:][documents[:, back:] != documents[:, :kept]] = vocab_size
        columns.append(column)
    return np.stack(columns[::-1], axis=-1)[targets != IGNORE].astype(np.int64)


class NgramCounts:
    """Counts of n-grams of `order` tokens; memory grows with the different n-grams, not with the text.

    Raises:
        DataError: n-grams that 64 bits cannot number.
    """

    def __init__(self, order: int, vocab_size: int) -> None:
        if order * np.log2(vocab_size + 1) >= 63:
            raise DataError(
                problem("order", order, f"small enough for {vocab_size} tokens to the power of it below 2^63", "lower it")
            )
        self.order, self.vocab_size, self.base = order, vocab_size, vocab_size + 1
        self._keys, self._counts = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        self._new: list[Keys] = []

    def add(self, batch: Batch) -> None:
        """Counts the n-grams of a batch."""
        grams = ngrams(batch, self.order, self.vocab_size)
        self._new.append(grams @ self.base ** np.arange(self.order - 1, -1, -1))
        if sum(map(len, self._new)) >= _MERGE_AT:
            self._merge()

    def of_order(self, order: int) -> tuple[Keys, Int[np.ndarray, " N"]]:
        """The keys of the n-grams of an order up to that of the counts, ascending, with their counts."""
        self._merge()
        return _summed(self._keys % self.base**order, self._counts)

    def _merge(self) -> None:
        keys = np.concatenate([self._keys, *self._new])
        counts = np.concatenate([self._counts, *(np.ones(len(new), dtype=np.int64) for new in self._new)])
        (self._keys, self._counts), self._new = _summed(keys, counts), []


class NgramModel:
    """Interpolated modified Kneser-Ney; the lowest order is interpolated with the uniform distribution.

    Equation: p_n(w | c) = max(a(c w) - D(a(c w)), 0) / a(c .) + g(c) p_{n-1}(w | c'), with c' the context without its first
        token, g(c) the discounted mass over a(c .), and p_0 = 1 / V; a counts occurrences in the highest order and, in the
        lower ones, the different tokens seen before an n-gram. D_i = i - (i + 1) Y n_{i+1} / n_i for i = 1, 2 and 3 or more,
        Y = n_1 / (n_1 + 2 n_2), with n_i the n-grams of count i; between 0.1 and i.
    Source: An Empirical Study of Smoothing Techniques for Language Modeling, Chen and Goodman, TR-10-98, section 3.
    Deviates: discounts without counts are those of the next smaller count, or 0.1 if no n-gram occurs once.

    Raises:
        DataError: no n-gram was counted.

    Example:
        >>> import torch
        >>> counts = NgramCounts(2, vocab_size=3)
        >>> counts.add(Batch(torch.tensor([[0, 1, 0, 1, 0]]), torch.tensor([[1, 0, 1, 0, 2]]), None))
        >>> NgramModel(counts, 2).probabilities(np.array([[0, 0], [0, 1], [0, 2]])).round(3).tolist()
        [0.244, 0.244, 0.511]
    """

    def __init__(self, counts: NgramCounts, order: int) -> None:
        self.order, self.base = order, counts.base
        keys, found = counts.of_order(order)
        if not len(keys):
            raise DataError("training text: holds no target to count; must hold one; use longer documents or packing=joined")
        levels = [_level(keys, found, self.base)]
        for lower in range(order - 1, 0, -1):
            # Different preceding tokens, not occurrences: a token that follows one token only is a poor guess elsewhere.
            keys, found = _summed(keys % self.base**lower, np.ones(len(keys), dtype=np.int64))
            levels.append(_level(keys, found, self.base))
        self._levels = levels[::-1]

    def probabilities(self, grams: Int[np.ndarray, "N O"]) -> Float[np.ndarray, " N"]:
        """The probability of the last token of each n-gram after the others."""
        grams = grams[:, grams.shape[1] - self.order :]
        p = np.full(len(grams), 1.0 / (self.base - 1))
        for order, level in enumerate(self._levels, start=1):
            keys = grams[:, self.order - order :] @ self.base ** np.arange(order - 1, -1, -1)
            p = level.interpolated(keys, keys // self.base, p)
        return p

    def loss(self, batches: Iterable[Batch]) -> float:
        """The mean loss on the targets of some batches, nats per token.

        Raises:
            DataError: no target counts.
        """
        total, n = 0.0, 0
        for grams in _chunks(batches, self.order, self.base - 1):
            total -= float(np.log(self.probabilities(grams)).sum())
            n += len(grams)
        if not n:
            raise DataError("validation text: holds no target that counts; must hold one; use longer documents")
        return total / n


@dataclass(frozen=True)
class NgramLosses:
    """Losses of the n-gram models on validation text, nats per token; `tokens` counts training targets."""

    unigram: float
    bigram: float
    trigram: float
    tokens: int


def ngram_losses(train: Iterable[Batch], validation: Iterable[Batch], vocab_size: int) -> NgramLosses:
    """Counts training batches, each window once, and scores validation batches by unigram, bigram and trigram.

    Raises:
        DataError: either has no target that counts.
    """
    counts, scored, tokens = NgramCounts(3, vocab_size), list(validation), 0
    for batch in train:
        counts.add(batch)
        tokens += batch.n_targets
    unigram, bigram, trigram = (NgramModel(counts, order).loss(scored) for order in (1, 2, 3))
    return NgramLosses(unigram, bigram, trigram, tokens)


@dataclass(frozen=True)
class _Level:
    """The discounted counts of one order, by ascending key of the n-gram, and the mass left to lower orders by context."""

    grams: Keys
    discounted: Float[np.ndarray, " N"]
    contexts: Keys
    totals: Float[np.ndarray, " N"]
    left: Float[np.ndarray, " N"]

    def interpolated(self, grams: Keys, contexts: Keys, lower: Float[np.ndarray, " N"]) -> Float[np.ndarray, " N"]:
        """Probabilities of this order, given those of the order below."""
        at, known = _find(self.contexts, contexts)
        index, seen = _find(self.grams, grams)
        own = np.where(seen, self.discounted[index], 0.0)
        return np.where(known, (own + self.left[at] * lower) / self.totals[at], lower)


def _level(keys: Keys, counts: Int[np.ndarray, " N"], base: int) -> _Level:
    taken = np.array((0.0, *discounts(counts)))[np.minimum(counts, 3)]
    contexts, first = np.unique(keys // base, return_index=True)
    totals, left = (np.add.reduceat(values.astype(np.float64), first) for values in (counts, taken))
    return _Level(keys, counts - taken, contexts, totals, left)


def discounts(counts: Int[np.ndarray, " N"]) -> tuple[float, float, float]:
    """The discounts of counts of 1, of 2, and of 3 or more, see `NgramModel`.

    Example:
        >>> [round(float(d), 4) for d in discounts(np.array([1] * 6 + [2] * 3 + [3] * 2 + [4]))]
        [0.5, 1.0, 2.0]
    """
    n1, n2, n3, n4 = (int((counts == count).sum()) for count in (1, 2, 3, 4))
    if not n1:
        return LEAST_DISCOUNT, LEAST_DISCOUNT, LEAST_DISCOUNT
    y, found = n1 / (n1 + 2 * n2), list[float]()
    for count, n, more in ((1, n1, n2), (2, n2, n3), (3, n3, n4)):
        value = count - (count + 1) * y * more / n if n else found[-1]
        found.append(min(max(value, LEAST_DISCOUNT), float(count)))
    return found[0], found[1], found[2]


def _summed(keys: Keys, weights: Int[np.ndarray, " N"]) -> tuple[Keys, Int[np.ndarray, " N"]]:
    """The different keys in ascending order, with the sum of the weights of each."""
    unique, inverse = np.unique(keys, return_inverse=True)
    # Exact: sums are integers below 2^53.
    return unique, np.bincount(inverse.reshape(-1), weights, len(unique)).astype(np.int64)


def _find(among: Keys, wanted: Keys) -> tuple[Keys, Int[np.ndarray, " N"]]:
    """The index of each key among ascending ones, and whether it is present."""
    index = np.minimum(np.searchsorted(among, wanted), len(among) - 1)
    return index, among[index] == wanted


def _chunks(batches: Iterable[Batch], order: int, vocab_size: int) -> Iterator[Int[np.ndarray, "N O"]]:
    for batch in batches:
        grams = ngrams(batch, order, vocab_size)
        yield from (grams[at : at + _SCORED_AT_ONCE] for at in range(0, len(grams), _SCORED_AT_ONCE))


@dataclass(frozen=True)
class AnswerGuesses:
    """Guesses at the answers of validation samples.

    Attributes:
        chance: loss of guessing by the frequency of each answer in training, nats per answer.
        majority: accuracy of the most frequent answer.
        in_context: loss of a uniform guess among the possible answers in the sample before the question; None if an answer is
            not among them.
        answers: number of answers in training.
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
