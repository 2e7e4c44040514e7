"""How likely a model finds a text that follows another: the quantity behind multiple-choice evaluation and perplexity."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from twoaxis.core.errors import DataError
from twoaxis.model.decoder import Decoder


class Likelihood(NamedTuple):
    """The likelihood of a continuation.

    Attributes:
        nats: sum of log p over exactly the tokens of the continuation, at most 0.
        tokens: how many tokens that are.
        greedy: whether each of them is the most likely one at its place.
    """

    nats: float
    tokens: int
    greedy: bool


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
    pieces of half of max_seq_len, each behind as many earlier tokens as fit.

    Raises:
        DataError: no token to predict the first one from, or a token id outside the vocabulary.

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
    tokens = [*prefix, *continuation]
    nats, greedy = 0.0, True
    for first, last in _pieces(len(prefix), len(tokens), model.config.max_seq_len):
        begin = max(0, last - 1 - model.config.max_seq_len)
        inputs = torch.tensor([tokens[begin : last - 1]], device=model.head_weight.device)
        targets = torch.tensor(tokens[first:last], device=inputs.device)
        with torch.inference_mode():
            hidden, _ = model.hidden(model.embed(inputs))
            logits = model.logits(hidden[0, -len(targets) :]).double()
            nats -= float(F.cross_entropy(logits, targets, reduction="sum"))
            greedy = greedy and bool((logits.argmax(-1) == targets).all())
    return Likelihood(nats, len(continuation), greedy)


def _pieces(begin: int, end: int, longest: int) -> Iterator[tuple[int, int]]:
    """Cuts the tokens begin..end to predict into pieces of which each fits behind its context."""
    length = end - begin if end - begin <= longest else max(1, longest // 2)
    for first in range(begin, end, length or 1):
        yield first, min(first + length, end)
