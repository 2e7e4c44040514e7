"""Runs a decoder on a fixture: logits and gradients through the public path, states through the explicit contract."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from twoaxis.core.layout import TokenLayout
from twoaxis.depth.base import Mix
from twoaxis.model import Decoder
from twoaxis.model.trace import sublayer_list

from .golden import Golden, gradient


@torch.no_grad()
def states(model: Decoder, golden: Golden) -> Iterator[Any]:
    """Yields the depth state that enters each sublayer, and the last one."""
    embeddings = model.embed(golden.take("input/input_ids"))
    layout = TokenLayout.contiguous(embeddings.shape[1])
    state = model.ends.enter(embeddings)[0]
    for sublayer in sublayer_list(model):
        yield state
        state, _ = sublayer(state, layout)
    yield state


def logits_and_gradients(model: Decoder, golden: Golden) -> dict[str, Tensor]:
    """Runs forward and backward from the embeddings; also returns the final normalised hidden states as `hidden`."""
    embeddings = model.embed(golden.take("input/input_ids"))
    if "input/inputs_embeds" in golden:
        assert torch.equal(embeddings, golden.take("input/inputs_embeds"))
    embeddings.retain_grad()
    hidden, _ = model.hidden(embeddings)
    logits = F.linear(hidden, model.head_weight)
    logits.backward(golden.take("input/cotangent_logits"))
    return {"output/logits": logits, "grad/input_embeds": gradient(embeddings), "hidden": hidden}


def streams_and_heads(
    model: Decoder, golden: Golden, seen: Callable[[int, Mix], None]
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Runs forward and backward; returns the stream before each block and at the end, and logits and a gradient by name.

    The number of a sublayer and what mixed its heads go to `seen`.
    """
    embeddings = model.embed(golden.take("input/input_ids"))
    embeddings.retain_grad()
    layout = TokenLayout.contiguous(embeddings.shape[1])
    state: Any = model.ends.enter(embeddings)[0]
    streams = [embeddings]
    for index, sublayer in enumerate(sublayer_list(model)):

        def called(mix: Mix, index: int = index) -> Mix:
            seen(index, mix)
            return mix

        view, carry, _ = sublayer.depth.read(state)
        context = sublayer.normalise(view)
        update, state, _ = sublayer.mix(context, state, layout, seen=called)
        state = sublayer.depth.write(state, update, context, carry)
        if index % 2:
            streams.append(state.stream)
    logits = model.logits(model.norm(state.stream))
    logits.backward(golden.take("input/cotangent"))
    return streams, {"output/logits": logits, "grad/input_embeddings": gradient(embeddings)}
