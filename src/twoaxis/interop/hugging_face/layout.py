"""From attention masks and position ids, as transformers passes them, to the layout of tokens.

Letters: B batch, T tokens of this call, S tokens so far, these included.
"""

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from twoaxis.core.errors import ConfigError, problem
from twoaxis.core.layout import PADDING, TokenLayout
from twoaxis.model import DecoderCache


def token_layout(
    tokens: int,
    device: torch.device,
    mask: Shaped[Tensor, "B S"] | None,
    position_ids: Int[Tensor, "_ T"] | None,
    before: DecoderCache | None,
) -> TokenLayout | None:
    """The layout that a mask and position ids describe; None when rows simply go on, or begin.

    Without a mask and a cache, position ids that do not count up by 1 begin another document, as in batches packed without
    padding. Otherwise position ids are taken as they are.

    Args:
        tokens: of this call.
        device: of the tokens.
        mask: not 0 where a token is real, for all tokens so far; None when all are.
        position_ids: of the tokens of this call, or None to count the real tokens of each row.
        before: where the cached tokens end, or None.

    Raises:
        ConfigError: a mask of another shape, or with padding between real tokens.
    """
    layout = None if mask is None else _masked(tokens, mask, before)
    if position_ids is None:
        return layout
    plain = layout or (TokenLayout.contiguous(tokens, device=device) if before is None else before.layout(tokens, device))
    given = position_ids.expand_as(plain.positions) if position_ids.shape[0] == 1 else position_ids
    if plain.documents is None:
        counts = torch.equal(given, plain.positions.expand_as(given))
    else:
        counts = bool(((given == plain.positions) | (plain.documents == PADDING)).all())
    if counts:
        return layout
    begins = given[:, 1:] != given[:, :-1] + 1
    if mask is None and before is None and begins.any():
        return TokenLayout(given, torch.nn.functional.pad(begins, (1, 0)).cumsum(dim=1))
    return TokenLayout(given, plain.documents)


def _masked(tokens: int, mask: Tensor, before: DecoderCache | None) -> TokenLayout | None:
    past = 0 if before is None else before.length
    if mask.ndim != 2 or mask.shape[1] != past + tokens:
        allowed = f"[batch, {past + tokens}], one number for each of the {past} cached and {tokens} new tokens"
        raise ConfigError(problem("shape of attention_mask", tuple(mask.shape), allowed, "pass the tokenizer's own mask"))
    real = mask != 0
    if real[:, past:].all() and (past or real.all()):
        return None
    if ((real[:, 1:] & ~real[:, :-1]).sum(dim=1) + real[:, 0] > 1).any():
        raise ConfigError("attention_mask: has padding between real tokens; must be padded on one side; move the padding there")
    documents = torch.where(real, 0, PADDING)
    positions = (real.cumsum(dim=1) - 1).clamp(min=0)
    return TokenLayout(positions[:, past:], documents[:, past:])
