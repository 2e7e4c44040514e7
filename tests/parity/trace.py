"""Runs a decoder on a fixture: logits and gradients through the public path, states through the explicit contract."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from twoaxis.core.layout import TokenLayout
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
