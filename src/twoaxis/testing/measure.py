"""What a run keeps, counts and touches: the measured side of every declared number."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from twoaxis.core.layout import TokenLayout
from twoaxis.model import Decoder

PAIR_PRODUCTS = ("bmm", "baddbmm", "scaled_dot_product")
STATISTICS = (
    "softmax",
    "exp",
    "log",
    "sqrt",
    "rsqrt",
    "pow",
    "sigmoid",
    "tanh",
    "sum",
    "mean",
    "var",
    "norm",
    "logsumexp",
    "cumsum",
    "prod",
)
"""Operations whose result feeds a statistic: a normaliser, a gate or a softmax."""


def tensors(value: Any) -> list[Tensor]:
    """Every tensor of a nested value, in order."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def reachable_tensors(value: Any) -> list[Tensor]:
    """Every tensor that an object holds, through its attributes, tuples, lists and dictionaries."""
    found: list[Tensor] = []
    seen: set[int] = set()
    todo = [value]
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(item, str | int | float | type | nn.Module | None):
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, dict):
            todo.extend(item.values())
        elif isinstance(item, list | tuple | set):
            todo.extend(item)
        else:
            todo.extend(getattr(item, "__dict__", {}).values())
    return found


def storage_bytes(found: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages behind these tensors."""
    return sum({s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in found)}.values())


def saved_bytes(run: Callable[[], Any], known: Callable[[Any], Iterable[Tensor]]) -> int:
    """Bytes of the distinct storages that autograd keeps, other than those of known tensors.

    Args:
        run: what is measured.
        known: given what `run` returned, the parameters, inputs and outputs that are alive anyway.
    """
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    alive = {t.untyped_storage().data_ptr() for t in known(result)}
    return storage_bytes(t for t in kept if t.untyped_storage().data_ptr() not in alive)


def product_flops(run: Callable[[], Any]) -> tuple[int, int]:
    """Counts (all matrix products, those between activations: attention scores and values)."""
    with FlopCounterMode(display=False) as counter:
        run()
    by_operation = counter.get_flop_counts().get("Global", {})
    pairs = sum(n for operation, n in by_operation.items() if any(word in str(operation) for word in PAIR_PRODUCTS))
    return counter.get_total_flops(), pairs


class LowPrecisionStatistics(TorchDispatchMode):
    """Notes every operation of `STATISTICS` that returns half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operation and looks at its result."""
        result = func(*args, **(kwargs or {}))
        words = func.overloadpacket.__name__.strip("_").split("_")
        if any(word in STATISTICS for word in words) and "backward" not in words:
            dtypes = {t.dtype for t in tensors(result)}
            if dtypes & {torch.bfloat16, torch.float16}:
                self.found.append(func.overloadpacket.__name__)
        return result


class Trace(NamedTuple):
    """One pass through a decoder, sublayer by sublayer."""

    states: list[Any]
    views: list[list[Tensor]]
    contexts: list[Any]
    heads: list[Any]
    updates: list[Tensor]
    left: Tensor
    logits: Tensor


def trace(model: Decoder, tokens: Tensor, disturbances: dict[int, Tensor] | None = None) -> Trace:
    """Runs the contract loop by hand, adding a disturbance to the update of some sublayers.

    Everything is recorded as it is at that moment; only the states are the live values.
    """
    embeddings = model.embed(tokens)
    layout = TokenLayout.contiguous(tokens.shape[1])
    state = model.ends.enter(embeddings)
    states, views, contexts, heads, updates = [state], [], [], [], []
    for index, sublayer in enumerate(sublayer_list(model)):
        view, carry = sublayer.depth.read(state)
        views.append([t + 0 for t in tensors(view)])
        context = sublayer.normalise(view)
        heads.append(sublayer.mixer.project(context) if sublayer.depth.mixes_heads else ())
        update, state, _ = sublayer.mix(context, state, layout)
        if disturbances and index in disturbances:
            update = update + disturbances[index]
        contexts.append(context)
        updates.append(update)
        state = sublayer.depth.write(state, update, context, carry)
        states.append(state)
    left = model.ends.leave(state)
    logits = nn.functional.linear(model.norm(left), model.head_weight)
    return Trace(states, views, contexts, heads, updates, left + 0, logits)


def read_and_write(mixer: Any, state: Any, update: Tensor, context: Any, heads: Any) -> tuple[Any, Any, Any]:
    """What one depth mixer makes of a state: the views, the heads if it mixes them, and the next state."""
    views, carry = mixer.read(state)
    if heads:
        heads, state = mixer.mix_heads(heads, context, state)
    return views, heads, mixer.write(state, update, context, carry)


def sublayer_list(model: Decoder) -> list[Any]:
    """The sublayers of a decoder in order."""
    return [sublayer for block in model.blocks for sublayer in block.sublayers]  # type: ignore[union-attr]


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """The gradient of every parameter by name, zeros where there is none; the model's own `.grad` stays as it is."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return {n: torch.zeros_like(p) if g is None else g for n, p, g in zip(names, parameters, found, strict=True)}
