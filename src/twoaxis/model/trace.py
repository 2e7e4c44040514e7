"""A forward pass through a decoder that records what passes between its parts."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from twoaxis.core.layout import TokenLayout
from twoaxis.core.measure import tensors
from twoaxis.model.decoder import Decoder


class Trace(NamedTuple):
    """One pass through a decoder, sublayer by sublayer."""

    states: list[Any]
    views: list[list[Tensor]]
    contexts: list[Any]
    heads: list[Any]
    updates: list[Tensor]
    left: Tensor
    logits: Tensor
    layout: TokenLayout


def trace(model: Decoder, tokens: Tensor, disturbances: dict[int, Tensor] | None = None) -> Trace:
    """Runs the loop over sublayers, adding a disturbance to the update of some of them.

    The views and the final hidden states are copies, so that a write in place shows; everything else is not copied.
    """
    layout = TokenLayout.contiguous(tokens.shape[1]).of(tokens)
    embeddings, _ = model.mix_embeddings(model.embed(tokens), layout)
    state, _ = model.ends.enter(embeddings)
    states, views, contexts, heads, updates = [state], [], [], [], []
    for index, sublayer in enumerate(sublayer_list(model)):
        view, carry, _ = sublayer.depth.read(state, layout)
        views.append([t + 0 for t in tensors(view)])
        context = sublayer.normalise(view)
        heads.append(sublayer.heads(context, layout)[0])
        update, state, _ = sublayer.mix(context, state, layout)
        if disturbances and index in disturbances:
            update = update + disturbances[index]
        contexts.append(context)
        updates.append(update)
        state = sublayer.depth.write(state, update, context, carry)
        states.append(state)
    left, _ = model.ends.leave(state)
    logits = nn.functional.linear(model.norm(left), model.head_weight)
    return Trace(states, views, contexts, heads, updates, left + 0, logits, layout)


def read_and_write(
    mixer: Any, state: Any, update: Tensor, context: Any, heads: Any, layout: TokenLayout
) -> tuple[Any, Any, Any]:
    """Returns what one depth mixer makes of a state: the views, the heads if it mixes them, and the next state."""
    views, carry, _ = mixer.read(state, layout)
    if mixer.mixes_heads:
        heads, state = mixer.mix_heads(heads, context, state, layout)
    return views, heads, mixer.write(state, update, context, carry)


def equal_tokens(like: Tensor) -> TokenLayout:
    """Returns the layout of rows as long as these whose tokens have one id, so that only positions and vectors differ."""
    ids = torch.zeros(like.shape[:2], dtype=torch.int64, device=like.device)
    return TokenLayout.contiguous(like.shape[1], device=like.device).of(ids)


def sublayer_list(model: Decoder) -> list[Any]:
    """Returns the sublayers of a decoder in order."""
    return [sublayer for block in model.blocks for sublayer in block.sublayers]  # type: ignore[union-attr]
