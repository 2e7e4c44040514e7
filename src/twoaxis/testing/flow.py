"""Checks that the meter, on meta tensors, finds the states and the traffic of depth mixers on real tensors."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from twoaxis.core.cost import Shape
from twoaxis.core.measure import saved_for_backward, storage_of
from twoaxis.depth import DepthConfig
from twoaxis.ledger.decoder_memory import decoder_trace
from twoaxis.ledger.meter import watch
from twoaxis.ledger.stack import StackTrace
from twoaxis.model import Decoder
from twoaxis.testing.conformance import check, exactly
from twoaxis.testing.measured import Trace, sublayer_list, tensors, trace
from twoaxis.testing.toy import ATTENTION, odd_width, toy_decoder, toy_tokens

DTYPES = (torch.float64, torch.bfloat16)
"""A dtype with statistics as wide as numbers, and one with wider statistics."""


def _runs(config: DepthConfig) -> Iterator[tuple[str, Decoder, StackTrace]]:
    """Yields (where, model, trace of the meter) for every tested stack."""
    stacks: tuple[tuple[str, dict[str, Any]], ...] = (
        (" of odd width", {"d_model": odd_width(config)}),
        (" of 4 single sublayers", {"n_layers": 4, "blocks": ((ATTENTION,),)}),
    )
    for name, changes in stacks:
        for dtype in DTYPES:
            model = toy_decoder(config, dtype=dtype, **changes)
            batch, tokens = toy_tokens().shape
            shape = Shape(batch, tokens, dtype.itemsize)
            yield f"{name} in {dtype}", model, decoder_trace(model.config, shape)


@check
def metered_states_are_real(config: DepthConfig) -> None:
    """The tensors of every state have the sizes and dtypes that the meter finds, and are shared and saved as it finds."""
    for where, model, found in _runs(config):
        with saved_for_backward() as saved:
            run = trace(model, toy_tokens())
        held, numbers = {storage_of(tensor) for tensor in saved}, dict[tuple[int, int], int]()
        for index, (state, metered) in enumerate(zip(run.states, found.states, strict=True)):
            exactly(f"tensors in state {index}{where}", len(tensors(state)), len(metered))
            for place, (tensor, other) in enumerate(zip(tensors(state), metered, strict=True)):
                number = numbers.setdefault((tensor.data_ptr(), tensor.numel()), len(numbers))
                real = (number, tuple(tensor.shape), tensor.dtype, storage_of(tensor) in held)
                expected = (other.number, other.shape, other.dtype, other.saved)
                exactly(f"number, shape, dtype and saving of tensor {place} of state {index}{where}", real, expected)


@check
def metered_traffic_is_real(config: DepthConfig) -> None:
    """Read, head mixing and write, and the two ends, read and write the bytes that the meter finds."""
    for where, model, found in _runs(config):
        tokens = toy_tokens()
        run = trace(model, tokens)
        for index, (sublayer, metered) in enumerate(zip(sublayer_list(model), found.sublayers, strict=True)):
            real = _of_sublayer(sublayer.depth, run, index)
            exactly(f"bytes read and written at sublayer {index}{where}", real, (metered.read, metered.written))
        real = _of_ends(model, run, tokens)
        exactly(f"bytes read and written at the ends{where}", real, (found.ends.read, found.ends.written))


def _of_sublayer(mixer: Any, run: Trace, index: int) -> tuple[int, int]:
    state, update, context, heads = run.states[index], run.updates[index], run.contexts[index], run.heads[index]
    owned = frozenset(storage_of(parameter) for parameter in mixer.parameters())
    calls = [watch(mixer.read, state, run.layout, owned=owned)]
    _, carry, _ = calls[0].result
    if mixer.mixes_heads:
        calls.append(watch(mixer.mix_heads, heads, context, state, run.layout, owned=owned))
        state = calls[-1].result[1]
    calls.append(watch(mixer.write, state, update, context, carry, owned=owned))
    return sum(call.read for call in calls), sum(call.written for call in calls)


def _of_ends(model: Decoder, run: Trace, tokens: Tensor) -> tuple[int, int]:
    owned = frozenset(storage_of(parameter) for parameter in model.ends.parameters())
    enter = watch(model.ends.enter, model.embed(tokens), owned=owned)
    leave = watch(model.ends.leave, run.states[-1], owned=owned)
    return enter.read + leave.read, enter.written + leave.written
