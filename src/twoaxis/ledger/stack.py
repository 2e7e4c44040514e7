"""One pass through the depth operations of a whole stack, watched by the meter.

Letters: B batch, T position, D width.
"""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from twoaxis.core.cost import Shape
from twoaxis.core.errors import ConfigError
from twoaxis.core.layout import TokenLayout
from twoaxis.core.measure import (
    Operations,
    bytes_behind,
    counted_dtype,
    element_bytes,
    first_ways,
    saved_for_backward,
    storage_bytes,
    storage_of,
    storages_of,
    tensors,
)
from twoaxis.core.position import LayerStack, SublayerPosition
from twoaxis.core.views import QKV, Heads
from twoaxis.depth import DepthConfig, DepthMixer
from twoaxis.depth.base import NoHeads
from twoaxis.ledger.meter import Call, Kernels, Mode, held_bytes, leaf, measured_dtype, moved, placed, watch, without_memory
from twoaxis.ledger.repeats import Repeat, likeness, pattern
from twoaxis.local import LocalConfig, LocalMixer
from twoaxis.model.config import SublayerConfig
from twoaxis.ops.norm import layer_norm, rms_norm
from twoaxis.sequence import SequenceConfig

MOST_KERNELS = 20_000
"""Operations of one sublayer beyond which a depth mixer is no longer run without a compiler by anyone."""

Norm = Literal["rms", "layer"]


class TooManyKernels(ConfigError):
    """A depth mixer that takes too many operations to run without a compiler."""


@dataclass(frozen=True)
class StateTensor:
    """One tensor of a depth state.

    Attributes:
        number: the same for the same tensor, in two states or twice in one.
        shape: of it.
        dtype: of it, or that it counts as.
        saved: whether autograd saves it for the backward pass: for the norm behind a read, or for a later write.
    """

    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    saved: bool = False

    @property
    def elements(self) -> int:
        """How many it has."""
        return torch.Size(self.shape).numel()

    @property
    def bytes(self) -> int:
        """Their bytes."""
        return self.elements * self.dtype.itemsize


@dataclass(frozen=True)
class DepthOperation:
    """The depth operation of one sublayer, or of the two ends together; every count is of the whole pass.

    Read, head mixing and write count as one kernel each for `read` and `written`: the least that memory has to move, whatever
    the engine. So a carry that the read makes is written there and read by the write, a tensor that a state holds twice is read
    once, and what a step hands on unchanged costs nothing. Parameters are left out, since a pass reads them once.

    Attributes:
        read: bytes that come from memory: of the state, the heads, the update, the context and the carry.
        written: bytes that go to memory: of the views, the carry, the heads and the next state.
        views: those of the written ones that are views for the sublayer (or, of the ends, for the final norm) and in no state.
        saves_update: whether autograd saves the update (or, of the ends, the embeddings) although no state holds it.
        saved: bytes saved for the backward pass beyond parameters, inputs and outputs.
        heads_saved: bytes saved by a sublayer whose heads are mixed, beyond its input, its output and states; else 0.
        cache: bytes that generation carries to the next token.
        forward: operations when nothing is compiled.
        backward: those of the backward pass; nothing unless asked for.
    """

    read: int = 0
    written: int = 0
    views: int = 0
    saves_update: bool = False
    saved: int = 0
    heads_saved: int = 0
    cache: int = 0
    forward: Kernels = field(default_factory=Kernels)
    backward: Kernels = field(default_factory=Kernels)

    @property
    def moved(self) -> int:
        """Bytes that are read or written."""
        return self.read + self.written


@dataclass(frozen=True)
class StackTrace:
    """One pass.

    Attributes:
        shape: of the pass.
        states: the tensors of the state that enters each sublayer, and of the one that is left.
        sublayers: the depth operation of each.
        ends: that of entering and leaving.
        saves: (sublayer, storage, bytes) of everything that autograd saves in reads, writes, norms and head mixing, with the
            context that every sublayer saves; sublayer -1 is what comes before the first, `len(sublayers)` what comes after the
            last. A storage that is saved several times is named several times.
        state_storages: of each state.
        embedding_saved: bytes saved by the norm and the local mixer between the embedding and the stack.
    """

    shape: Shape
    states: tuple[tuple[StateTensor, ...], ...]
    sublayers: tuple[DepthOperation, ...]
    ends: DepthOperation
    saves: tuple[tuple[int, int, int], ...] = field(repr=False)
    state_storages: tuple[tuple[tuple[int, int], ...], ...] = field(repr=False)
    embedding_saved: int = 0

    def handed_over(self, index: int) -> int:
        """Bytes saved at a sublayer of what passes between its parts and is in no state: views, context, update, statistics."""
        passed = sum(self._passed.get(index, {}).values())
        return passed - self.sublayers[index].saved - self.sublayers[index].heads_saved

    @cached_property
    def _passed(self) -> dict[int, dict[int, int]]:
        """By sublayer, the storages that it saves and no state holds, with their bytes."""
        held, found = {storage for state in self.state_storages for storage, _ in state}, dict[int, dict[int, int]]()
        for at, storage, size in self.saves:
            if storage not in held:
                found.setdefault(at, {})[storage] = size
        return found

    def state_bytes(self, index: int) -> int:
        """Bytes per token of the state that enters a sublayer; one that it holds twice counts twice."""
        return sum(tensor.bytes for tensor in self.states[index]) // self.shape.total_tokens

    def state_elements(self, index: int) -> int:
        """Elements per token of the state that enters a sublayer."""
        return sum(tensor.elements for tensor in self.states[index]) // self.shape.total_tokens


def trace_stack(
    depth: DepthConfig,
    stack: LayerStack,
    shape: Shape,
    *,
    parts: Sequence[SublayerConfig | None] = (),
    norm: Norm = "rms",
    embedding_norm: bool = False,
    embedding_local: LocalConfig | None = None,
    mode: Mode = "eager",
    backward: bool = False,
    traffic: bool = True,
) -> StackTrace:
    """Runs the depth operations of a whole stack on tensors without memory; a sublayer is but a tensor of the right size.

    Args:
        depth: the depth mixer.
        stack: as the mixer has prepared it.
        shape: sequences, tokens in each, and bytes of one number.
        parts: the sublayers, which matter where their heads are mixed; None stands for one of another library.
        norm: before every sublayer and behind the last.
        embedding_norm: whether a norm stands between the embedding and the stack.
        embedding_local: the local mixer behind that, if any.
        mode: what runs.
        backward: whether kernels are counted, in both passes; without it engines leave out results that move nothing new.
        traffic: whether reads, writes and kernels are counted, element by element, which takes long for many tokens.

    Raises:
        TooManyKernels: more than `MOST_KERNELS` operations in one pass of one sublayer.

    Example:
        >>> from twoaxis.depth import ResidualConfig
        >>> found = trace_stack(ResidualConfig(), LayerStack(8, 1e-6, (1,)), Shape(1, 1), backward=True)
        >>> found.sublayers[0].read, found.sublayers[0].written, found.sublayers[0].forward.count
        (64, 32, 1)
    """
    with without_memory(mode, shape.element_bytes), nullcontext() if backward else first_ways():
        every = tuple(parts) or (None,) * stack.n_sublayers
        tracer = _Tracer(depth, stack, shape, every, norm, embedding_local, mode, backward, traffic)
        return tracer.run(embedding_norm)


class _Tracer:
    """The pass, as far as it has come."""

    def __init__(
        self,
        depth: DepthConfig,
        stack: LayerStack,
        shape: Shape,
        parts: tuple[SublayerConfig | None, ...],
        norm: Norm,
        local: LocalConfig | None,
        mode: Mode,
        backward: bool,
        traffic: bool,
    ) -> None:
        self.mode = mode
        self.depth, self.stack, self.shape, self.parts, self.norm, self.backward = depth, stack, shape, parts, norm, backward
        self.dtype = measured_dtype(mode, shape.element_bytes)
        with torch.device("meta"):
            mixers, ends = depth.build(stack)
            attend = [self._attention(mixer, site) for mixer, site in zip(mixers, stack.sites, strict=True)]
            self.local = local and local.build(stack.d_model, stack.sites[0])
            known = nn.ModuleList([*mixers, ends, *(module for module in (*attend, self.local) if module is not None)])
        placed(known, self.dtype)
        self.mixers, self.ends, self.attention = mixers, ends, attend
        self.gain = nn.Parameter(torch.empty(stack.d_model, dtype=self.dtype))
        self.owned = frozenset(storage_of(p) for p in (*known.parameters(), *known.buffers(), self.gain))
        ids = torch.zeros(shape.batch, shape.tokens, dtype=torch.int64)
        self.layout = TokenLayout.contiguous(shape.tokens).of(ids)
        self.saves: list[tuple[int, Tensor]] = []
        self.states: list[Any] = []
        self.repeats: dict[Any, Repeat[DepthOperation]] = {}
        self.watched: Any = {"owned": self.owned, "traffic": traffic, "kernels": backward}

    def _attention(self, mixer: DepthMixer, site: SublayerPosition) -> Any:
        part = self.parts[site.index]
        return part.build(site) if mixer.mixes_heads and part is not None and site.slot.heads is not None else None

    def run(self, embedding_norm: bool) -> StackTrace:
        """The whole pass."""
        B, T, D = self.shape.batch, self.shape.tokens, self.stack.d_model
        embeddings = torch.empty(B, T, D, dtype=self.dtype, requires_grad=True)
        if embedding_norm:
            embeddings = leaf(self._normalise(embeddings, -1))
        if self.local is not None:
            embeddings = leaf(self._mix_embeddings(embeddings, self.local))
        embedding_saved = storage_bytes(tensor for _, tensor in self.saves)
        enter = self._ends(self.ends.enter, embeddings, -1)
        self.states.append(enter.result[0])
        operations = [self._once(mixer, site) for mixer, site in zip(self.mixers, self.stack.sites, strict=True)]
        last = self.states[-1]
        leave = self._ends(self.ends.leave, last, self.stack.n_sublayers)
        self._normalise(leave.result[0], self.stack.n_sublayers)
        return StackTrace(
            self.shape,
            self._state_tensors(),
            tuple(operations),
            self._both_ends(embeddings, enter, last, leave),
            tuple((index, storage_of(tensor), bytes_behind(tensor)) for index, tensor in self.saves),
            tuple(tuple((storage_of(t), bytes_behind(t)) for t in tensors(state)) for state in self.states),
            embedding_saved,
        )

    def _ends(self, operation: Any, given: Any, index: int) -> Call:
        call = watch(operation, _leaves(given), **self.watched)
        self._save(index, call.saved)
        return call

    def _both_ends(self, embeddings: Tensor, enter: Call, last: Any, leave: Call) -> DepthOperation:
        given, entered, left = (storages_of(value) for value in (embeddings, enter.result, leave.result))
        alive = given | entered | storages_of(last) | left
        backward = sum((self._backward_of(call.result) for call in (enter, leave)), Kernels())
        return DepthOperation(
            read=enter.read + leave.read,
            written=enter.written + leave.written,
            views=leave.written if not left & storages_of(last) else 0,
            saves_update=any(storage_of(tensor) in given - entered for tensor in enter.saved),
            saved=self._beyond((*enter.saved, *leave.saved), alive),
            cache=self._ends_cache(embeddings),
            forward=enter.kernels + leave.kernels,
            backward=backward,
        )

    def _once(self, mixer: DepthMixer, site: SublayerPosition) -> DepthOperation:
        """The sublayer, run unless an equal one has run on such a state."""
        state, start = self.states[-1], len(self.saves)
        key = (likeness(mixer), pattern(state), site.slot, self.parts[site.index])
        if key not in self.repeats:
            operation = self._sublayer(mixer, site)
            saved = [tensor for _, tensor in self.saves[start:]]
            self.repeats[key] = Repeat.of(operation, state, saved, self.states[-1])
        else:
            saved, following = self.repeats[key].on(state)
            self._share_gradients(mixer)
            self._save(site.index, saved)
            self.states.append(following)
        return self.repeats[key].result

    def _share_gradients(self, mixer: DepthMixer) -> None:
        """Gives parameters gradients as the run does that is repeated, for sublayers to come may use some of them too."""
        if self.backward:
            for parameter in mixer.parameters():
                parameter.grad = torch.empty_like(parameter)

    def _sublayer(self, mixer: DepthMixer, site: SublayerPosition) -> DepthOperation:
        index, state = site.index, _leaves(self.states[-1])
        read = watch(mixer.read, state, self.layout, **self.watched)
        views, carry, _ = read.result
        context: Any = _as_tuple(views)
        if site.slot.norm != "none":
            context = tuple(self._normalise(view, index) for view in context)
        context = tree_map(leaf, context)
        context = QKV(*context) if isinstance(views, QKV) else context[0]
        if self.mode != "autocast" and self._reads_context(site):
            # Every other sublayer maps its input by a matrix, whose gradient asks for it; autocast saves a narrow copy instead.
            self._save(index, tensors(context))
        calls, heads, mixed, heads_saved = [read], (), (), 0
        middle, events = state, list[Tensor]()
        if mixer.mixes_heads:
            mix, heads, events = self._mix(mixer, site, context, state)
            mixed, middle = mix.result
            calls.append(mix)
        update = self._empty(site.d_model + site.slot.update_extra)
        write = watch(mixer.write, middle, update, context, carry, **self.watched)
        following = write.result
        calls.append(write)
        self._check_kernels(site, calls)
        self.states.append(following)
        alive = storages_of((state, context, heads, mixed, update, views, following))
        saved = [tensor for call in calls for tensor in call.saved]
        if mixed:
            through = storages_of((heads, mixed))
            events += [tensor for call in calls for tensor in call.saved if storage_of(tensor) in through]
            heads_saved = self._beyond(events, storages_of((state, following, context)) | self._shared())
        self._save(index, saved)
        held = storages_of(following)
        return DepthOperation(
            read=sum(call.read for call in calls),
            written=sum(call.written for call in calls),
            views=self._view_bytes(views, state, following),
            saves_update=storage_of(update) not in held and any(storage_of(t) == storage_of(update) for t in write.saved),
            saved=self._beyond(saved, alive),
            heads_saved=heads_saved,
            cache=self._cache(mixer, state),
            forward=sum((call.kernels for call in calls), Kernels()),
            backward=self._backward_of((following, views, mixed)),
        )

    def _reads_context(self, site: SublayerPosition) -> bool:
        """Whether the mixer of a sublayer needs the context for its backward pass."""
        part = self.parts[site.index]
        return not isinstance(part, SequenceConfig) or part.reads_context or site.slot.update_extra > 0

    def _mix(
        self, mixer: DepthMixer, site: SublayerPosition, context: Any, state: Any
    ) -> tuple[Call, Heads | NoHeads, list[Tensor]]:
        """Head mixing between the two steps of attention, and what those save."""
        module, shape = self.attention[site.index], site.slot.heads
        if shape is None:
            return watch(mixer.mix_heads, (), context, state, **self.watched), (), []
        events: list[Tensor] = []
        if module is None:
            q, k, v = (self._empty(n, shape.head_dim) for n in (shape.n_heads, shape.n_kv_heads, shape.n_kv_heads))
            heads = Heads(q, k, v)
            if site.slot.heads_at == "rotated":
                heads = heads._replace(unrotated=(heads.k,))
        else:
            with saved_for_backward() as events, Operations(None):
                heads = module.project(context, self.layout)[0]
            heads = Heads(*_leaves(tuple(heads)))
        mix = watch(mixer.mix_heads, heads, context, state, self.layout, **self.watched)
        mixed = Heads(*_leaves(tuple(mix.result[0])))
        if module is None:
            # Attention saves what it takes.
            after = tensors(mixed)
        else:
            with saved_for_backward() as after, Operations(None):
                module.attend(mixed, self.layout, None, context)
        events = [tensor for tensor in (*events, *after) if storage_of(tensor) not in storages_of(context)]
        self._save(site.index, events)
        return mix, heads, events

    def _normalise(self, view: Tensor, index: int) -> Tensor:
        """The view behind its norm, which saves it."""
        with saved_for_backward() as saved, Operations(None):
            made = rms_norm(leaf(view), self.gain, 1e-6) if self.norm == "rms" else layer_norm(leaf(view), 1e-6)
        self._save(index, saved)
        return made

    def _mix_embeddings(self, embeddings: Tensor, local: LocalMixer) -> Tensor:
        with saved_for_backward() as saved, Operations(None):
            made, _ = local(embeddings, self.layout)
        self._save(-1, saved)
        return made

    def _empty(self, *shape: int) -> Tensor:
        """What a linear map of a sublayer makes."""
        size = (self.shape.batch, self.shape.tokens, *shape)
        return torch.empty(size, dtype=torch.bfloat16 if self.mode == "autocast" else self.dtype, requires_grad=True)

    def _save(self, index: int, saved: Iterable[Tensor]) -> None:
        shared = self._shared()
        self.saves += [(index, t) for t in saved if storage_of(t) not in self.owned and storage_of(t) not in shared]

    def _shared(self) -> set[int]:
        """Token ids and rotation tables, which all sublayers of a model share."""
        return storages_of((self.layout.positions, self.layout.tokens, list(self.layout._shared.values())))

    def _beyond(self, saved: Iterable[Tensor], known: set[int]) -> int:
        return storage_bytes(t for t in saved if storage_of(t) not in known and storage_of(t) not in self.owned)

    def _view_bytes(self, views: Any, state: Any, following: Any) -> int:
        held = storages_of((state, following)) | self.owned
        found = {storage_of(t): t.numel() * element_bytes(t) for t in tensors(views) if storage_of(t) not in held}
        return sum(found.values())

    def _check_kernels(self, site: SublayerPosition, calls: Sequence[Call]) -> None:
        if self.backward and sum(call.kernels.count for call in calls) > MOST_KERNELS:
            raise self._too_many(site.index)

    def _too_many(self, index: int) -> TooManyKernels:
        allowed = f"at most {MOST_KERNELS} operations in sublayer {index} of {self.stack.n_sublayers}"
        return TooManyKernels(
            f"engine 'eager': {self.depth.kind!r} must take {allowed}; got more, so plan it with engine='fused'"
        )

    def _backward_of(self, made: Any) -> Kernels:
        """Kernels of the backward pass; the gradient of a parameter that an earlier sublayer has used too is added to its."""
        outputs = [t for t in tensors(made) if t.requires_grad and t.grad_fn is not None] if self.backward else []
        total = Kernels()

        def note(operation: Any) -> None:
            nonlocal total
            if operation.moves:
                total += moved(operation)
            if total.count > MOST_KERNELS:
                raise self._too_many(len(self.states) - 2)

        if outputs:
            with Operations(note):
                torch.autograd.backward(outputs, [torch.empty_like(t) for t in outputs])
        return total

    def _cache(self, mixer: DepthMixer, state: Any) -> int:
        if not self.depth.design.position:
            return 0
        with torch.no_grad():
            return held_bytes(mixer.read(state, self.layout, ())[2])

    def _ends_cache(self, embeddings: Tensor) -> int:
        with torch.no_grad():
            local = 0 if self.local is None else held_bytes(self.local(embeddings, self.layout, self.local.new_cache())[1])
            if not self.depth.design.position:
                return local
            _, cache = self.ends.enter(embeddings, self.layout, ())
            return local + held_bytes(self.ends.leave(self.states[-1], self.layout, cache)[1])

    def _state_tensors(self) -> tuple[tuple[StateTensor, ...], ...]:
        saved, numbers = {storage_of(tensor) for _, tensor in self.saves}, dict[Any, int]()

        def named(tensor: Tensor) -> StateTensor:
            key = (storage_of(tensor), tensor.storage_offset(), tensor.shape)
            number = numbers.setdefault(key, len(numbers))
            return StateTensor(number, tuple(tensor.shape), counted_dtype(tensor.dtype), storage_of(tensor) in saved)

        with torch._C.DisableTorchFunction():
            return tuple(tuple(named(tensor) for tensor in tensors(state)) for state in self.states)


def _leaves(value: Any) -> Any:
    """The same with every tensor as a leaf; one that occurs twice stays one."""
    known: dict[int, Any] = {}

    def once(each: Any) -> Any:
        if id(each) not in known:
            known[id(each)] = leaf(each)
        return known[id(each)]

    return tree_map(once, value)


def _as_tuple(views: Any) -> tuple[Tensor, ...]:
    return tuple(views) if isinstance(views, QKV) else (views,)
