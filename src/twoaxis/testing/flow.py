"""Checks of what a depth mixer declares of its state, tensor by tensor, and of the traffic of its operation."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from twoaxis.core.measure import Operations, Reads, new_bytes, storage_of
from twoaxis.core.state import STATISTICS_BYTES, Flow
from twoaxis.depth import DepthConfig
from twoaxis.model import Decoder
from twoaxis.testing.check import check, exactly, require
from twoaxis.testing.measure import Trace, sublayer_list, tensors, trace
from twoaxis.testing.toy import ATTENTION, odd_width, toy_decoder, toy_tokens

DTYPES = (torch.float64, torch.bfloat16)
"""One in which a statistic is as wide as any number, and one in which it is wider."""


def _runs(config: DepthConfig) -> Iterator[tuple[str, torch.dtype, Decoder]]:
    """(where, dtype, model) of every stack that is looked at."""
    stacks: tuple[tuple[str, dict[str, Any]], ...] = (
        (" of odd width", {"d_model": odd_width(config)}),
        (" of 1 block", {"n_layers": 1}),
        (" of 4 single sublayers", {"n_layers": 4, "blocks": ((ATTENTION,),)}),
        (" of 1 sublayer", {"n_layers": 1, "blocks": ((ATTENTION,),)}),
    )
    for name, changes in stacks:
        for dtype in DTYPES:
            yield f"{name} in {dtype}", dtype, toy_decoder(config, dtype=dtype, **changes)


@check
def state_leaves_are_exact(config: DepthConfig) -> None:
    """The tensors of every state have the declared sizes and dtypes, are shared as declared, and are kept as declared."""
    for where, dtype, model in _runs(config):
        kept: list[Tensor] = []
        with saved_tensors_hooks(_into(kept), lambda tensor: tensor):
            run = trace(model, toy_tokens())
        _leaves_are_exact(config, model, run, where, dtype)
        _sharing_is_exact(config, model, run, where)
        saved = {storage_of(tensor) for tensor in kept}
        for index, state in enumerate(run.states):
            for leaf, tensor in zip(config.state(model.config.stack, index), tensors(state), strict=True):
                exactly(f"autograd keeps {leaf.name!r} of state {index}{where}", storage_of(tensor) in saved, leaf.kept)


def _leaves_are_exact(config: DepthConfig, model: Decoder, run: Trace, where: str, dtype: torch.dtype) -> None:
    wide = torch.float32 if dtype.itemsize < STATISTICS_BYTES else dtype
    for index, state in enumerate(run.states):
        declared, found = config.state(model.config.stack, index), tensors(state)
        exactly(f"tensors in state {index}{where}", len(found), len(declared))
        for leaf, tensor in zip(declared, found, strict=True):
            what, numbers = f"{leaf.name!r} of state {index}{where}", leaf.numbers
            require(not numbers.model or not numbers.statistics, f"{what}: declares two dtypes, a tensor has one")
            exactly(f"numbers per token in {what}", tensor.numel() / toy_tokens().numel(), numbers.count)
            exactly(f"dtype of {what}", tensor.dtype, wide if numbers.statistics else dtype)


def _sharing_is_exact(config: DepthConfig, model: Decoder, run: Trace, where: str) -> None:
    by_name: dict[str, tuple[int, int]] = {}
    by_place: dict[tuple[int, int], str] = {}
    for index, state in enumerate(run.states):
        for leaf, tensor in zip(config.state(model.config.stack, index), tensors(state), strict=True):
            at = (tensor.data_ptr(), tensor.numel())
            what = f"the tensor {leaf.name!r} of state {index}{where}"
            exactly(f"{what} is the first of this name", at == by_name.setdefault(leaf.name, at), True)
            exactly(f"name of {what}, from where it was first", by_place.setdefault(at, leaf.name), leaf.name)


def _into(kept: list[Tensor]) -> Callable[[Tensor], Tensor]:
    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    return pack


@check
def flow_is_exact(config: DepthConfig) -> None:
    """Read, head mixing and write, and the two ends, read and write exactly the declared numbers, each once."""
    for where, dtype, model in _runs(config):
        tokens, stack = toy_tokens(), model.config.stack
        run = trace(model, tokens)
        for site, sublayer in zip(stack.sites, sublayer_list(model), strict=True):
            found = _of_sublayer(sublayer.depth, run, site.index)
            _flow_is(f"sublayer {site.index}{where}", found, config.flow(site), dtype)
        _flow_is(f"the ends{where}", _of_ends(model, run, tokens), config.ends_flow(stack), dtype)


class _Measured(NamedTuple):
    """Bytes per batch, and whether the update is kept."""

    read: int
    written: int
    views: int
    keeps_update: bool = False


def _flow_is(what: str, found: _Measured, declared: Flow, dtype: torch.dtype) -> None:
    for name in ("read", "written", "views"):
        measured = getattr(found, name) / toy_tokens().numel()
        exactly(f"bytes per token, {name}, of {what}", measured, getattr(declared, name).bytes(dtype.itemsize))
    exactly(f"autograd keeps the update of {what}", found.keeps_update, declared.keeps_update)


def _of_sublayer(mixer: Any, run: Trace, index: int) -> _Measured:
    state, update, context, heads = run.states[index], run.updates[index], run.contexts[index], run.heads[index]
    (views, carry), read, written = _call(mixer.read, state)
    if heads:
        (_, state), mixed, made = _call(mixer.mix_heads, heads, context, state)
        read, written = read + mixed, written + made
    kept: list[Tensor] = []
    with saved_tensors_hooks(_into(kept), lambda tensor: tensor):
        following, last, made = _call(mixer.write, state, update, context, carry)
    held = {storage_of(tensor) for tensor in tensors(following)}
    keeps_update = storage_of(update) not in held and storage_of(update) in {storage_of(tensor) for tensor in kept}
    fresh = new_bytes(views, (run.states[index], following))
    return _Measured(read + last, written + made, fresh, keeps_update)


def _of_ends(model: Decoder, run: Trace, tokens: Tensor) -> _Measured:
    embeddings, kept = model.embed(tokens), list[Tensor]()
    with saved_tensors_hooks(_into(kept), lambda tensor: tensor):
        entered, read, written = _call(model.ends.enter, embeddings)
    held = {storage_of(tensor) for tensor in tensors(entered)}
    keeps_embeddings = storage_of(embeddings) not in held and storage_of(embeddings) in {storage_of(tensor) for tensor in kept}
    left, last, made = _call(model.ends.leave, run.states[-1])
    return _Measured(read + last, written + made, new_bytes(left, run.states[-1]), keeps_embeddings)


def _call(operation: Any, *given: Any) -> tuple[Any, int, int]:
    """What a method of a module returns, and the bytes that it reads of what it was given and makes anew, parameters aside."""
    parameters = list(operation.__self__.parameters())
    owned = {storage_of(parameter) for parameter in parameters}
    reads = Reads(tensor for tensor in tensors(given) if storage_of(tensor) not in owned)
    with Operations(reads.note):
        result = operation(*given)
    return result, reads.touched.bytes(), new_bytes(result, (given, parameters))
