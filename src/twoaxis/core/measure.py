"""What any module holds, counts and learns from: measurements that need no model of ours."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

PAIR_PRODUCTS = ("bmm", "baddbmm", "scaled_dot_product")


def tensors(value: Any) -> list[Tensor]:
    """Every tensor of a nested value, in order."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def product_flops(run: Callable[[], Any]) -> tuple[int, int]:
    """Counts (all matrix products, those between activations: attention scores and values); convolutions are neither."""
    with FlopCounterMode(display=False) as counter:
        run()
    counted = {str(operation): n for operation, n in counter.get_flop_counts().get("Global", {}).items()}
    products = {operation: n for operation, n in counted.items() if "convolution" not in operation}
    pairs = sum(n for operation, n in products.items() if any(word in operation for word in PAIR_PRODUCTS))
    return sum(products.values()), pairs


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """The gradient of every parameter by name, zeros where there is none; the model's own `.grad` stays as it is."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return {n: torch.zeros_like(p) if g is None else g for n, p, g in zip(names, parameters, found, strict=True)}


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
