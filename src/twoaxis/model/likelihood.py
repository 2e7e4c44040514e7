"""Log-likelihood of tokens given the tokens before them, as in multiple-choice evaluation and perplexity.

Letters: T tokens of a passage.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor

from twoaxis.core.errors import ConfigError, DataError, problem
from twoaxis.model.decoder import Decoder, token_row

BATCH_SIZE = 8
"""Windows in one forward pass by default."""

ROWS_AT_ONCE = 256
"""Tokens whose logits exist at the same time."""


class Likelihood(NamedTuple):
    """The likelihood of a continuation.

    Attributes:
        nats: sum of log p over exactly the tokens of the continuation, at most 0.
        tokens: number of these tokens.
        greedy: whether each of them is the most likely one at its position.
    """

    nats: float
    tokens: int
    greedy: bool


class Passage(NamedTuple):
    """Tokens of which the last ones are scored.

    Attributes:
        tokens: context and scored tokens.
        first: index of the first scored token; those before it are context.
    """

    tokens: Int[Tensor, " T"] | Sequence[int]
    first: int


class Window(NamedTuple):
    """The tokens that one forward pass reads and scores.

    Attributes:
        begin: the first token that is read.
        first: the first token that is scored.
        last: one past the last token that is scored; that token itself is not read.
    """

    begin: int
    first: int
    last: int


def loglikelihood(
    model: Decoder, context: Sequence[int], continuation: Sequence[int], begin_token: int | None = None
) -> Likelihood:
    """Sums log p(continuation | context), one term per token of the continuation.

    Args:
        model: the decoder.
        context: tokens before; may be empty when there is a begin token.
        continuation: tokens to score.
        begin_token: put before the context unless it begins with it already; None puts nothing.

    A context that does not fit in max_seq_len loses its oldest tokens. A continuation that does not fit is scored in
    windows, as `loglikelihoods` does.

    Raises:
        DataError: no token to predict the first one from, or a token id that is no whole number of the vocabulary.

    Example:
        >>> from twoaxis import DecoderConfig
        >>> model = Decoder.build(DecoderConfig(vocab_size=8, d_model=8, n_layers=1))
        >>> loglikelihood(model, [1, 2, 3], [4, 5]).tokens
        2
    """
    prefix = list(context)
    if begin_token is not None and prefix[:1] != [begin_token]:
        prefix.insert(0, begin_token)
    if not prefix:
        raise DataError("context: got no tokens: must be at least one, to predict the first from; give a begin_token")
    return loglikelihoods(model, [Passage([*prefix, *continuation], len(prefix))])[0]


def loglikelihoods(
    model: Decoder,
    passages: Sequence[Passage],
    batch_size: int = BATCH_SIZE,
    stride: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Likelihood]:
    """Scores many passages; each token is scored once, and the score of a passage does not depend on the others.

    A passage whose scored tokens fit in max_seq_len is read in one window, which ends with it and reaches as far back as
    fits. A longer one is read in windows of max_seq_len tokens: the first scores all that fit, each later one the next
    `stride` tokens, after max_seq_len - stride or more tokens of context.

    A first token without context has no prediction: it counts as drawn from a uniform distribution, -log V nats for a
    vocabulary of V, and never as greedy.

    Args:
        model: the decoder.
        passages: tokens to score.
        batch_size: windows in one forward pass.
        stride: tokens that a later window scores, from 1 (as much context as fits for each token) to max_seq_len (no
            overlap); None is half of max_seq_len.
        progress: called with the tokens scored so far and all of them.

    Raises:
        ConfigError: a batch size or a stride out of range.
        DataError: a token id that is no whole number of the vocabulary.
    """
    longest = model.config.max_seq_len
    stride = max(1, longest // 2) if stride is None else stride
    if not 1 <= stride <= longest:
        raise ConfigError(problem("stride", stride, f"in 1..max_seq_len={longest}", "leave it out for half of max_seq_len"))
    if batch_size < 1:
        raise ConfigError(problem("batch_size", batch_size, ">= 1", "set it to 1 or more"))
    nats, greedy, rows, work = [0.0] * len(passages), [True] * len(passages), [], []
    for index, (tokens, first) in enumerate(passages):
        # Here, since the last one is only a target, which the model never reads.
        rows.append(token_row(tokens, model.config.vocab_size))
        if not first and len(tokens):
            nats[index], greedy[index] = -math.log(model.config.vocab_size), False
        work += [(index, window) for window in windows(max(1, first), len(tokens), longest, stride)]
    # Windows of similar length share a batch; the longest come first, so that a lack of memory shows at once.
    work.sort(key=lambda one: one[1].begin - one[1].last)
    done, total = 0, sum(window.last - window.first for _, window in work)
    for start in range(0, len(work), batch_size):
        batch = work[start : start + batch_size]
        scores = _score(model, [(rows[index], window) for index, window in batch])
        for (index, window), (found, best) in zip(batch, scores, strict=True):
            nats[index] += found
            greedy[index] = greedy[index] and best
            done += window.last - window.first
        if progress:
            progress(done, total)
    counts = [len(passage.tokens) - passage.first for passage in passages]
    return [Likelihood(*one) for one in zip(nats, counts, greedy, strict=True)]


def windows(first: int, end: int, longest: int, stride: int) -> Iterator[Window]:
    """Cuts the tokens first..end, of a passage that ends there, into windows that score each of them once.

    Args:
        first: the first token to score, at least 1.
        end: one past the last.
        longest: tokens that a window reads at most.
        stride: tokens that a later window scores, at most `longest`.

    Example:
        >>> list(windows(1, 9, longest=4, stride=2))
        [Window(begin=0, first=1, last=5), Window(begin=2, first=5, last=7), Window(begin=4, first=7, last=9)]
    """
    fits = end - first <= longest
    while first < end:
        last = end if fits else min(end, max(first + stride, longest + 1))
        yield Window(max(0, last - 1 - longest), first, last)
        first = last


def _score(model: Decoder, rows: Sequence[tuple[Tensor, Window]]) -> list[tuple[float, bool]]:
    """For each row the sum of log p in nats, and whether every scored token is the most likely one."""
    lengths = [window.last - 1 - window.begin for _, window in rows]
    # Padding comes after the tokens, where no token attends to it.
    inputs = torch.zeros(len(rows), max(lengths), dtype=torch.long)
    for row, (tokens, window) in enumerate(rows):
        inputs[row, : lengths[row]] = tokens[window.begin : window.last - 1]
    device, scores = model.head_weight.device, []
    with torch.inference_mode():
        inputs = inputs.to(device)
        hidden, _ = model.hidden(model.embed(inputs), tokens=inputs)
        for row, (tokens, window) in enumerate(rows):
            targets = tokens[window.first : window.last].to(device)
            scored = hidden[row, lengths[row] - len(targets) : lengths[row]]
            nats, greedy = 0.0, True
            for part, target in zip(scored.split(ROWS_AT_ONCE), targets.split(ROWS_AT_ONCE), strict=True):
                logits = model.logits(part).double()
                nats -= float(F.cross_entropy(logits, target, reduction="sum"))
                greedy = greedy and bool((logits.argmax(-1) == target).all())
            scores.append((nats, greedy))
    return scores
