"""Validation on fixed batches."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from twoaxis.core.errors import DataError
from twoaxis.data import Batch, PreparedData


class Validation(NamedTuple):
    """What a validation measured.

    Attributes:
        loss: mean over the valid tokens in nats per token.
        bpb: the same loss in bits per byte of text.
        tokens: valid tokens.
        accuracy: part of the valid tokens that the model finds the most likely; None unless the corpus asks for answers.
    """

    loss: float
    bpb: float
    tokens: int
    accuracy: float | None = None


def evaluate(
    token_loss: Callable[[Batch], Tensor],
    batches: Sequence[Batch],
    data: PreparedData,
    hits: Callable[[Batch], Tensor] | None = None,
) -> Validation:
    """Computes the mean loss over the batches, and the accuracy for a corpus that asks for answers.

    Args:
        token_loss: the sum of the token losses of a batch, without a graph.
        batches: on the CPU.
        data: tells tokens per byte, and whether there are answers.
        hits: counts the targets of a batch that are the most likely token; None measures no accuracy.

    Raises:
        DataError: the batches hold no valid target.
    """
    tokens = sum(batch.n_targets for batch in batches)
    if not tokens:
        raise DataError(
            "validation has no valid target: every next token belongs to another document; "
            "use longer documents or data.packing=joined"
        )
    # Summed in float64 on the CPU, so that many batches do not lose digits.
    loss = float(torch.stack([token_loss(batch) for batch in batches]).cpu().double().sum()) / tokens
    accuracy = None
    if hits is not None and data.answer_cues:
        accuracy = int(torch.stack([hits(batch) for batch in batches]).sum()) / tokens
    return Validation(loss, data.bits_per_byte(loss), tokens, accuracy)
