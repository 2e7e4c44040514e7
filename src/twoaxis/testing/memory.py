"""Checks that the meter, on meta tensors, finds what real ones do: bytes saved for backward, depth states, and traffic."""

import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from twoaxis.core.cost import Shape
from twoaxis.core.layout import TokenLayout
from twoaxis.core.measure import perturb, saved_bytes, saved_for_backward, storage_bytes, storage_of, tensors
from twoaxis.core.parameters import initialise
from twoaxis.core.position import SublayerInfo, SublayerPosition
from twoaxis.depth import DepthConfig
from twoaxis.feed_forward import FeedForwardConfig
from twoaxis.ledger.decoder_memory import blocks_saved_bytes, decoder_saved_bytes, decoder_trace, recomputing_saved_bytes
from twoaxis.ledger.meter import watch
from twoaxis.ledger.stack import StackTrace
from twoaxis.ledger.sublayer import sublayer_saved_bytes
from twoaxis.local import LocalConfig
from twoaxis.model import Decoder
from twoaxis.ops.kernels import without_kernels
from twoaxis.sequence import SequenceConfig
from twoaxis.testing.conformance import check, exactly, require
from twoaxis.testing.measured import Trace, reachable_tensors, sublayer_list, trace
from twoaxis.testing.toy import (
    ATTENTION,
    D_MODEL,
    TOKENS,
    AxisConfig,
    MixerConfig,
    odd_width,
    toy_context,
    toy_decoder,
    toy_layout,
    toy_mixer,
    toy_site,
    toy_tokens,
)

STATE_DTYPES = (torch.bfloat16, torch.float64)
"""Of each tested stack: a dtype with statistics wider than numbers, and one with statistics as wide."""

_SINGLE, _ODD, _CHUNKS, _PADDED = (1, 1), (2, TOKENS), (1, 40), (2, 70)
SHAPES = {
    torch.float64: (_SINGLE, _CHUNKS),
    torch.float32: (_SINGLE, _ODD),
    torch.bfloat16: (_SINGLE, _ODD, _CHUNKS, _PADDED),
}
"""Sequences x tokens of each dtype: a single one, an odd batch, and rows that engines process in chunks, with and without
padding. In bfloat16 statistics are wider than numbers, so that both count apart."""

EXTRA = 2
"""Additional channels of an update in one of the variants."""


@check
@without_kernels()
def mixer_saved_bytes_are_exact(config: MixerConfig) -> None:
    """Without kernels, autograd saves the bytes that the meter finds, beyond parameters, input, output and shared tables."""
    for dtype, shapes in SHAPES.items():
        mixers = [("", toy_mixer(config, dtype=dtype), toy_site(), shapes)]
        if not isinstance(config, LocalConfig):
            mixers.append((" with a wider update", *_with_wider_update(config, dtype), shapes[-1:]))
        for what, mixer, site, shapes_of_it in mixers:
            for batch, tokens in shapes_of_it:
                shape = Shape(batch, tokens, dtype.itemsize)
                rotations = config.rotations if isinstance(config, LocalConfig) else config.rotations(D_MODEL)
                metered = sublayer_saved_bytes(config, site, shape) + sum(table.saved_bytes(shape) for table in rotations)
                real = _saved_by(mixer, toy_context(batch, tokens).to(dtype).requires_grad_())
                exactly(f"bytes saved of {batch} x {tokens} tokens in {dtype}{what}", real, metered)


def _with_wider_update(config: SequenceConfig | FeedForwardConfig, dtype: torch.dtype) -> tuple[Any, SublayerPosition]:
    site = toy_site()
    slots = tuple(SublayerInfo(config.kind, update_extra=EXTRA) for _ in site.stack.sites)
    site = replace(site, stack=replace(site.stack, slots=slots))
    mixer = config.build(site)
    initialise(mixer, 0)
    return perturb(mixer.to(dtype)), site


def _saved_by(mixer: Any, context: Tensor) -> int:
    layout = toy_layout(context)
    known = [context, layout.ids("toy"), *mixer.parameters()]
    return saved_bytes(lambda: mixer(context, layout)[0], lambda update: [update, *known])


def _runs(config: AxisConfig) -> Iterator[tuple[str, Decoder, Shape]]:
    """Yields (where, model, shape) of every tested decoder, with statistics wider than numbers and without."""
    half, single = torch.bfloat16, torch.float32
    yield f" in {half}", toy_decoder(config, dtype=half, n_layers=2), Shape(2, TOKENS, half.itemsize)
    changes: dict[str, Any] = {"n_layers": 4, "blocks": ((ATTENTION,),)} if isinstance(config, DepthConfig) else {"n_layers": 1}
    layers = f" of {changes['n_layers']} layers in {single}"
    yield layers, toy_decoder(config, dtype=single, **changes), Shape(2, TOKENS, single.itemsize)


@check
@without_kernels()
def decoder_saved_bytes_are_exact(config: AxisConfig) -> None:
    """Without kernels, autograd saves the bytes that the meter finds for a whole decoder."""
    tokens, targets = toy_tokens(), toy_tokens(seed=1)
    for where, model, shape in _runs(config):
        measured = saved_bytes(lambda: model.loss(tokens, targets), lambda _: [tokens, targets, *model.parameters()])  # noqa: B023
        exactly(f"bytes saved by a decoder{where}", measured, decoder_saved_bytes(model.config, shape))


@check
@without_kernels()
def recomputing_bytes_are_exact(config: AxisConfig) -> None:
    """Without kernels, the meter finds what recomputation saves between passes, and while a block is recomputed."""
    for where, model, shape in _runs(config):
        between = recomputing_saved_bytes(model.config, shape)
        exactly(f"bytes kept between the passes{where}", _kept_between_passes(model), between)
        inside = blocks_saved_bytes(model.config, shape)
        exactly(f"bytes saved while each block is recomputed{where}", list(_kept_in_blocks(model)), inside)


def _kept_between_passes(model: Decoder) -> int:
    """Bytes of the tensors that hooks receive, and of the states and tables from which blocks are recomputed."""
    tokens, targets, given, layouts = toy_tokens(), toy_tokens(seed=1), list[Any](), list[Any]()

    def note(_: Any, inputs: tuple[Any, TokenLayout]) -> None:
        given.extend(weakref.ref(tensor) for tensor in tensors(inputs[0]))
        layouts.append(weakref.ref(inputs[1]))

    def known(_: Any) -> list[Tensor]:
        alive = [reference() for reference in given]
        require(
            all(tensor is not None for tensor in alive), "a state between blocks: gone after the forward pass, must be kept"
        )
        tables = [tensor for layout in layouts for tensor in reachable_tensors(layout()) if tensor.is_floating_point()]
        between.extend((*alive, *tables))
        return [tokens, targets, *model.parameters(), *between]

    between: list[Tensor] = []
    hooks = [block.register_forward_pre_hook(note) for block in model.blocks]
    rest = saved_bytes(lambda: model.loss(tokens, targets, recompute=True), known)
    for hook in hooks:
        hook.remove()
    owned = {storage_of(parameter) for parameter in model.parameters()}
    return rest + storage_bytes(tensor for tensor in between if storage_of(tensor) not in owned)


def _kept_in_blocks(model: Decoder) -> Iterator[int]:
    tokens = toy_tokens()
    layout = TokenLayout.contiguous(tokens.shape[1]).of(tokens)
    states = [model.ends.enter(model.embed(tokens))[0]]

    def run(block: Any) -> None:
        states.append(block(states[-1], layout)[0])

    for block in model.blocks:
        entered = [*model.parameters(), *tensors(states[-1])]
        yield saved_bytes(lambda: run(block), lambda _: [*entered, *reachable_tensors(layout)])  # noqa: B023


def _stacks(config: DepthConfig) -> Iterator[tuple[str, Decoder, StackTrace]]:
    """Yields (where, model, trace of the meter) for every tested stack."""
    stacks: tuple[tuple[str, dict[str, Any]], ...] = (
        (" of odd width", {"d_model": odd_width(config)}),
        (" of 4 single sublayers", {"n_layers": 4, "blocks": ((ATTENTION,),)}),
    )
    for (name, changes), dtype in zip(stacks, STATE_DTYPES, strict=True):
        model = toy_decoder(config, dtype=dtype, **changes)
        batch, tokens = toy_tokens().shape
        shape = Shape(batch, tokens, dtype.itemsize)
        yield f"{name} in {dtype}", model, decoder_trace(model.config, shape)


@check
def metered_states_are_real(config: DepthConfig) -> None:
    """The tensors of every state have the sizes and dtypes that the meter finds, and are shared and saved as it finds."""
    for where, model, found in _stacks(config):
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
    for where, model, found in _stacks(config):
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
