"""Checks of the depth state: it is immutable, and all that a pipeline cut sends."""

import gc
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from twoaxis.core.layout import TokenLayout
from twoaxis.depth import DepthConfig
from twoaxis.model import Decoder
from twoaxis.testing.conformance import check, close, exactly, identical, require
from twoaxis.testing.measured import gradients, sublayer_list, tensors, trace
from twoaxis.testing.toy import ATTENTION, noise, toy_decoder, toy_tokens


@check
def state_is_immutable(config: DepthConfig) -> None:
    """No tensor of any state is written in place, in the forward or the backward pass, at any depth."""
    for layers in (1, 7):
        keeps_its_states(toy_decoder(config, n_layers=layers, blocks=((ATTENTION,),)))
    keeps_its_states(toy_decoder(config))


def keeps_its_states(model: Decoder) -> None:
    """Fails if a tensor of a depth state changes after it was computed."""
    kept: list[tuple[str, Tensor, int, Tensor]] = []

    def keep(place: str, state: Any) -> None:
        kept.extend((place, t, t._version, t.detach().clone()) for t in tensors(state))

    def compare(when: str) -> None:
        for place, live, version, copy in kept:
            identical(f"state {place} {when}", live.detach(), copy)
            exactly(f"in-place writes to state {place} {when}", live._version - version, 0)

    tokens = toy_tokens()
    state, _ = model.ends.enter(model.embed(tokens))
    keep("0", state)
    for index, sublayer in enumerate(sublayer_list(model)):
        state, _ = sublayer(state, TokenLayout.contiguous(tokens.shape[1]).of(tokens))
        keep(str(index + 1), state)
    left, _ = model.ends.leave(state)
    compare("after the forward pass")
    (model.norm(left) * noise(tuple(left.shape), "loss")).sum().backward()
    compare("after the backward pass")


@check
def pipeline_cut(config: DepthConfig) -> None:
    """Gradients are unchanged by a cut at any block boundary that sends the state alone, with two microbatches in flight."""
    model = toy_decoder(config)
    batches = [toy_tokens(seed=seed) for seed in range(2)]
    expected = gradients(model, sum((_loss(model(tokens)) for tokens in batches), torch.zeros((), dtype=torch.float64)))
    for boundary in range(1, len(model.blocks)):
        model.zero_grad()
        in_flight = [_cut_forward(model, tokens, boundary) for tokens in batches]
        for loss, sent, received in in_flight:
            loss.backward()
            pairs = [(t, r.grad) for t, r in zip(sent, received, strict=True) if r.grad is not None]
            torch.autograd.backward([t for t, _ in pairs], [gradient for _, gradient in pairs])
        for name, parameter in model.named_parameters():
            got = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            close(f"gradient of {name}, cut before block {boundary}", got, expected[name], "same_gradients")


def _cut_forward(model: Decoder, tokens: Tensor, boundary: int) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    layout = TokenLayout.contiguous(tokens.shape[1]).of(tokens)
    state, _ = model.ends.enter(model.embed(tokens))
    for block in model.blocks[:boundary]:
        state, _ = block(state, layout)
    received = tree_map(lambda t: t.detach().clone().requires_grad_(), state)
    sent, arrived = tensors(state), tensors(received)
    state = received
    for block in model.blocks[boundary:]:
        state, _ = block(state, layout)
    hidden = model.norm(model.ends.leave(state)[0])
    return _loss(torch.nn.functional.linear(hidden, model.head_weight)), sent, arrived


def _loss(logits: Tensor) -> Tensor:
    return (logits * noise(tuple(logits.shape), "loss")).sum()


@check
def graph_is_released(config: DepthConfig) -> None:
    """After a step its states are freed, and a second step gives the same gradients."""
    model = toy_decoder(config)
    first, alive = _step(model)
    if any(reference() is not None for reference in alive):
        gc.collect()
    exactly("states alive after the step", sum(reference() is not None for reference in alive), 0)
    second, _ = _step(model)
    for name, gradient in first.items():
        identical(f"gradient of {name} in a second step", second[name], gradient)
    require(bool(alive), "no state was seen")


def _step(model: Decoder) -> tuple[dict[str, Tensor], list[weakref.ref[Tensor]]]:
    run = trace(model, toy_tokens())
    alive = [weakref.ref(t) for state in run.states for t in tensors(state)]
    model.zero_grad()
    _loss(run.logits).backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return found, alive
