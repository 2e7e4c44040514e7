"""Counts what each sublayer of a built model computes, saves and caches, by running it on the meta device."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from twoaxis.core.cost import ElementCount
from twoaxis.core.measure import Operation, Operations, storage_of

COUNTED, COUNTED_WITH_MASK = "twoaxis_counted", "twoaxis_counted_with_mask"
"""The names under which attention is recorded in place of being computed."""

GATHERS = {torch.ops.aten.index, torch.ops.aten.index_select}
OUTSIDE = (-1, -1)
"""The place of what runs between sublayers and around the layers."""

Groups = Mapping[int, Sequence[Sequence[torch.nn.Module]]]


@dataclass(frozen=True)
class Attention:
    """Softmax attention as one sublayer calls it.

    Attributes:
        n_heads: of the queries.
        n_kv_heads: of keys and values.
        key_dim: channels of one key.
        value_dim: channels of one value.
        window: keys that one query sees; None without a bound.
    """

    n_heads: int
    n_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None


@dataclass
class Counted:
    """What one sublayer does to so many tokens.

    Attributes:
        matmul: FLOPs of products with parameters, routed experts left out.
        products: FLOPs of all other products.
        elementwise: numbers that pointwise operations make.
        saved: numbers that autograd saves beyond parameters, by distinct storage.
        attention: its calls of softmax attention.
        per_token: experts that a token was sent to; 0 where none were gathered.
    """

    matmul: int = 0
    products: int = 0
    elementwise: int = 0
    saved: ElementCount = field(default_factory=ElementCount)
    attention: list[Attention] = field(default_factory=list)
    per_token: int = 0


@dataclass
class Run:
    """One forward pass.

    Attributes:
        tokens: in it.
        counted: by sublayer, as (layer, group).
        caches: by layer: (tensors that it keeps, its window or None).
        parallel: whether the second group of a layer does not depend on the first.
        read: the storages of all parameters that an operation was given.
    """

    tokens: int
    counted: dict[tuple[int, int], Counted]
    caches: dict[int, tuple[list[Tensor], int | None]]
    parallel: bool
    read: frozenset[int] = frozenset()


class _Attend(torch.autograd.Function):
    """Attention by its shapes, which keeps what one fused kernel keeps."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = value.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return out


class Tracer:
    """Counts operations into the sublayer that is running.

    Args:
        groups: modules of each traced layer, by sublayer.
        experts: parameters whose first axis counts routed experts.
        weights: all parameters.
        tokens: of the sequence.
    """

    def __init__(self, groups: Groups, experts: Sequence[Tensor], weights: Iterable[Tensor], tokens: int) -> None:
        self.groups, self.tokens = groups, tokens
        self.counted = defaultdict[tuple[int, int], Counted](Counted)
        self.here: tuple[int, int] | None = None
        self._experts = {storage_of(each) for each in experts}
        # Kept alive, so that no other tensor gets the same key.
        self._weights = {storage_of(each): each for each in weights}
        self._gathered = set(self._experts)
        self.read: set[int] = set()

    def note(self, operation: Operation) -> None:
        """Counts one operation."""
        out, packet = operation.result, operation.function._overloadpacket
        tensors = [each for each in operation.given if each.is_floating_point()]
        self.read.update(map(storage_of, tensors))
        self._follow(packet, tensors, out)
        into = self.counted[self.here or OUTSIDE]
        if packet in flop_registry:
            flops = flop_registry[packet](*operation.args, **operation.kwargs, out_val=out)
            keys = {storage_of(each) for each in tensors}
            if not keys & self._gathered:
                into.matmul += flops if keys & set(self._weights) else 0
                into.products += 0 if keys & set(self._weights) else flops
        elif torch.Tag.pointwise in operation.function.tags and isinstance(out, Tensor) and out.is_floating_point():
            into.elementwise += out.numel()

    def _follow(self, packet: Any, tensors: list[Tensor], out: Any) -> None:
        """Remembers what is made of parameters alone, such as a cast or the experts that were gathered."""
        if not tensors or packet is torch.ops.aten.embedding or not isinstance(out, Tensor):
            return
        keys = [storage_of(each) for each in tensors]
        if not all(key in self._weights for key in keys):
            return
        self._weights[storage_of(out)] = out
        if keys[0] in self._gathered:
            self._gathered.add(storage_of(out))
            if packet in GATHERS and self.here is not None and keys[0] in self._experts:
                self.counted[self.here].per_token = out.shape[0] // self.tokens

    def attend(self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **options: Any) -> Any:
        """Stands where transformers calls attention."""
        # It may take parameters of the module, such as sinks.
        self.read.update(map(storage_of, module.parameters(recurse=False)))
        if self.here is not None:
            # Where the call says it, the attribute may be that of other layers.
            window = options["sliding_window"] if "sliding_window" in options else getattr(module, "sliding_window", None)
            if hasattr(module, "indexer"):
                # An indexer lets a query see the best of all keys, as many as a window holds.
                window = getattr(module.config, "index_topk", window)
            window = window if isinstance(window, int) and window > 0 else None
            found = Attention(query.shape[1], key.shape[1], query.shape[-1], value.shape[-1], window)
            self.counted[self.here].attention.append(found)
        return _Attend.apply(query, key, value), None

    @contextmanager
    def sublayers(self) -> Iterator[None]:
        """Notes which sublayer runs, and what autograd saves in it."""
        handles = []
        for layer, groups in self.groups.items():
            for at, modules in enumerate(groups):
                for module in modules:
                    handles += [
                        module.register_forward_pre_hook(self._enter(layer, at)),
                        module.register_forward_hook(self._leave),
                    ]
        stored: dict[int, Tensor] = {}

        def save(tensor: Tensor) -> Tensor:
            key = storage_of(tensor)
            if self.here is not None and key not in stored and key not in self._weights:
                stored[key] = tensor
                into, size = self.counted[self.here], tensor.untyped_storage().nbytes() // tensor.element_size()
                wide = tensor.dtype in (torch.float32, torch.float64)
                numbers = ElementCount(statistics=size) if wide else ElementCount(size * tensor.element_size() // 2)
                into.saved = into.saved + numbers
            return tensor

        try:
            with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, layer: int, at: int) -> Any:
        def enter(*_: Any) -> None:
            self.here = (layer, at)

        return enter

    def _leave(self, *_: Any) -> None:
        self.here = None


def run(model: Any, layers: Any, groups: Groups, experts: Sequence[Tensor], twins: dict[int, int], tokens: int) -> Run:
    """Runs a model once on so many tokens.

    Args:
        model: on the meta device.
        layers: its decoder layers.
        groups: the sublayers of the layers that are traced.
        experts: parameters of routed experts.
        twins: for every layer the traced one that it equals, whose output it repeats.
        tokens: of one sequence.
    """
    tracer, outputs = Tracer(groups, experts, model.parameters(), tokens), {}
    for name in (COUNTED, COUNTED_WITH_MASK):
        import_module("transformers").AttentionInterface.register(name, tracer.attend)
    masks = import_module("transformers.masking_utils")
    masks.AttentionMaskInterface.register(COUNTED_WITH_MASK, masks.eager_mask)
    for index, twin in twins.items():
        layer = layers[index]
        if index != twin:
            layer.forward = lambda *_, _twin=twin, **__: outputs[_twin]
    handles = [
        layers[index].register_forward_hook(lambda _, __, out, _at=index: outputs.__setitem__(_at, out)) for index in groups
    ]
    ends: dict[tuple[int, int], tuple[Any, Any]] = {}
    handles += list(_watch_ends(groups, ends))
    try:
        with tracer.sublayers(), Operations(tracer.note):
            ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
            out = model(input_ids=ids, use_cache=True)
    finally:
        for handle in handles:
            handle.remove()
        for index in twins:
            layers[index].__dict__.pop("forward", None)
    read = frozenset(tracer.read & {storage_of(each) for each in model.parameters()})
    return Run(tokens, dict(tracer.counted), _caches(out, len(layers)), _parallel(ends), read)


def _caches(out: Any, n_layers: int) -> dict[int, tuple[list[Tensor], int | None]]:
    kind = import_module("transformers").Cache
    for cache in out.values():
        if isinstance(cache, kind):
            return {
                at: (
                    [each for each in _tensors(vars(layer)) if each.is_floating_point() and each.numel()],
                    layer.sliding_window if getattr(layer, "is_sliding", False) else None,
                )
                for at, layer in enumerate(cache.layers[:n_layers])
            }
    return {}


def _watch_ends(groups: Mapping[int, Any], ends: dict[tuple[int, int], tuple[Any, Any]]) -> Iterator[Any]:
    """Notes the input of each sublayer's first module and the output of its last one."""
    for layer, sublayers in groups.items():
        for at, modules in enumerate(sublayers):

            def note(module: Any, args: Any, kwargs: Any, out: Any, _key: Any = (layer, at)) -> None:
                entered = ends[_key][0] if _key in ends else _tensors((args, kwargs))
                ends[_key] = (entered, _tensors(out))

            for module in modules:
                yield module.register_forward_hook(note, with_kwargs=True)


def _parallel(ends: dict[tuple[int, int], tuple[Any, Any]]) -> bool:
    """Whether in some layer the input of the second sublayer was computed without the output of the first."""
    for (layer, at), (entered, _) in ends.items():
        if at == 1 and (layer, 0) in ends:
            sought = {id(each.grad_fn) for each in ends[layer, 0][1] if each.grad_fn is not None}
            limits = {id(each.grad_fn) for each in ends[layer, 0][0] if each.grad_fn is not None}
            open_, seen = [each.grad_fn for each in entered if each.grad_fn is not None], set()
            while open_:
                node = open_.pop()
                if id(node) in sought:
                    return False
                if id(node) not in seen and id(node) not in limits:
                    seen.add(id(node))
                    open_ += [each for each, _ in node.next_functions if each is not None]
            return bool(sought)
    return False


def _tensors(value: Any) -> list[Tensor]:
    """All tensors in nested containers."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [each for item in value for each in _tensors(item)] if isinstance(value, list | tuple) else []
