"""The arguments of a call: token layouts from masks and position ids, recorded hidden states.

Letters: B batch, T tokens of this call, S tokens so far, these included, D width.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from twoaxis.core.errors import ConfigError, problem
from twoaxis.core.layout import PADDING, TokenLayout, check_padding
from twoaxis.model import Decoder, DecoderCache
from twoaxis.model.block import Block


def token_layout(
    embeddings: Shaped[Tensor, "B T D"],
    mask: Shaped[Tensor, "B S"] | None,
    position_ids: Int[Tensor, "_ T"] | None,
    before: DecoderCache | None,
) -> TokenLayout | None:
    """The layout that a mask and position ids describe; None if every row begins or continues without padding.

    Position ids that do not count up by 1 begin another document, as in batches packed without padding. Otherwise they are
    taken as they are: they may begin anywhere. A mask without a 0 changes nothing.

    Args:
        embeddings: of the tokens of this call.
        mask: not 0 where a token is real, for all tokens so far; None when all are.
        position_ids: of the tokens of this call, or None to count the real tokens of each row.
        before: where the cached tokens end, or None.

    Raises:
        ConfigError: a mask of another shape, with padding between real tokens, or of another kind than that of the cached
            tokens; position ids that do not go on where the cached tokens end.
    """
    rows, tokens, _ = embeddings.shape
    for name, given in (("attention_mask", mask), ("position_ids", position_ids)):
        if given is not None and not isinstance(given, Tensor):
            raise ConfigError(problem(name, type(given).__name__, "a tensor", "pass what the tokenizer makes, or torch.tensor"))
    layout = None if mask is None else _masked(tokens, mask, before)
    if position_ids is None:
        return layout
    if position_ids.shape not in ((1, tokens), (rows, tokens)):
        got, allowed = tuple(position_ids.shape), f"({rows}, {tokens}) or (1, {tokens})"
        raise ConfigError(problem("shape of position_ids", got, allowed, "pass one for each token of this call"))
    device = embeddings.device
    plain = layout or (TokenLayout.contiguous(tokens, device=device) if before is None else before.layout(tokens, device))
    real = None if plain.documents is None else plain.documents != PADDING
    moved = position_ids != plain.positions
    if not (moved if real is None else moved & real).any():
        return layout
    if before is not None:
        raise ConfigError(
            "position_ids: do not go on where the cached tokens end; must count up from there; leave them out, or run packed "
            "documents in one call"
        )
    begins = F.pad(position_ids[:, 1:] != position_ids[:, :-1] + 1, (1, 0))
    if real is not None:
        begins = begins & real & F.pad(real[:, :-1], (1, 0))
    if not begins.any():
        return TokenLayout(position_ids, plain.documents)
    documents = begins.cumsum(dim=1).expand(rows, -1)
    return TokenLayout(position_ids, documents if real is None else documents.masked_fill(~real, PADDING))


def _masked(tokens: int, mask: Tensor, before: DecoderCache | None) -> TokenLayout | None:
    past = 0 if before is None else before.length
    if mask.ndim != 2 or mask.shape[1] != past + tokens:
        allowed = f"[batch, {past + tokens}], one number for each of the {past} cached and {tokens} new tokens"
        raise ConfigError(problem("shape of attention_mask", tuple(mask.shape), allowed, "pass the tokenizer's own mask"))
    real = mask != 0
    check_padding("attention_mask", real)
    seen, new = real[:, :past], real[:, past:]
    document, start = torch.zeros_like(mask[:, :1], dtype=torch.long), -1
    if before is not None and before.positions is not None:
        known = torch.ones_like(seen) if before.documents is None else before.documents != PADDING
        if not torch.equal(seen, known):
            raise ConfigError(
                "attention_mask: differs at cached tokens from the mask they were read with; must go on from that one; pass "
                "the same mask in every call, longer each time"
            )
        begun = seen.any(dim=1, keepdim=True)
        start = torch.where(begun, before.positions, -1)
        if before.documents is not None:
            document = torch.where(begun, before.documents[:, -1:], 0)
    if new.all() and (real[:, past - 1].all() if past else True):
        return None
    positions = (start + new.cumsum(dim=1)).clamp(min=0)
    return TokenLayout(positions, torch.where(new, document, PADDING))


Reads = Callable[[], list[Float[Tensor, "B T D"]]]


@contextmanager
def recorded_reads(decoder: Decoder, wanted: bool | None) -> Iterator[Reads]:
    """Yields a function that returns what the first sublayer of every block has read meanwhile, before its norm.

    Tokens of several calls follow one another. Where a sublayer reads separate queries, keys and values, it is the queries.

    Args:
        decoder: the model.
        wanted: whether anything is to be recorded.
    """
    found: list[list[Tensor]] = [[] for _ in decoder.blocks]
    with ExitStack() as hooks:
        for block, reads in zip(decoder.blocks if wanted else (), found, strict=False):

            def record(module: nn.Module, inputs: tuple[Any, ...], reads: list[Tensor] = reads) -> None:
                reads.append(inputs[0])

            handle = cast(Block, block).sublayers[0].norm.register_forward_pre_hook(record)
            hooks.callback(handle.remove)
        yield lambda: [torch.cat(reads, dim=1) for reads in found]
