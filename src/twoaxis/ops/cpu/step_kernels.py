"""The C kernels of decoding: each step reads every weight and every cached token for a few rows.

BLAS and PyTorch's attention are made for many rows, and read memory at a fraction of its speed for few.

Letters: B batch, N rows, K inputs or key width, V value width, O outputs, H heads, G kv-heads, S cached tokens.
"""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node

from twoaxis.ops import kernels
from twoaxis.ops.cpu import library

MOST_ROWS = 32
"""Rows of a product up to which its kernel is faster than BLAS, measured."""

LEAST_WEIGHTS = 2**15
"""Weights of a product from which on they take longer than the call of a kernel."""


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Computes x W^T: with few rows and without gradients by the kernel, else as PyTorch does."""
    few = x.ndim == 2 and x.shape[1:] == weight.shape[1:] and takes_few_rows(len(x), weight)
    if few and not torch.is_grad_enabled() and library.served(x, weight):
        return few_rows(x, weight)
    return F.linear(x, weight)


def takes_few_rows(rows: int, weight: Tensor) -> bool:
    """Whether the kernel would be faster than BLAS with so many rows; their dtype has to be that of the weights."""
    fits = rows <= MOST_ROWS and weight.numel() >= LEAST_WEIGHTS and weight.is_contiguous()
    return fits and weight.dtype == torch.float32 and weight.device.type == "cpu"


def _empty_product(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(len(x), len(weight))


@kernels.operator("few_rows(Tensor x, Tensor weight) -> Tensor", _empty_product, devices=("CPU",))
def few_rows(x: Tensor, weight: Tensor) -> Tensor:
    """Computes x [N K] times the transpose of the weights [O K]; a row comes out the same whatever the other rows are."""
    result = _empty_product(x, weight)
    library.call("few_rows", kernels.ready(x), kernels.ready(weight), result, *x.shape, len(weight))
    return result


def _empty_mixture(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    return q.new_empty(*q.shape[:3], v.shape[-1])


@kernels.operator(
    "decode_attention(Tensor q, Tensor k, Tensor v, Tensor mask, float scale) -> Tensor", _empty_mixture, devices=("CPU",)
)
def decode_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attention of one query [B H 1 K] of each row over keys [B G S K] and values [B G S V].

    The mask [B 1 1 S], or of one row for all, is added to the scores; of tokens where it is -inf, nothing is read. A query that
    sees no token gets zeros.
    """
    result = _empty_mixture(q, k, v, mask, scale)
    (B, H), (_, G, S, K), V = q.shape[:2], k.shape, v.shape[-1]
    given = [kernels.ready(x) for x in (q, k, v, mask)]
    library.call("decode_attention", *given, result, float(scale), B, H, G, S, K, V, S if len(mask) > 1 else 0)
    return result


@cache
def replace_by_kernels() -> Any:
    """A pass of the compiler that gives what a step computes for a few rows to these kernels."""
    # It takes seconds to load, and who compiles has to wait for it anyway.
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class ReplaceByKernels(CustomGraphPass):
        def __call__(self, graph: Graph) -> None:
            for product in graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default):
                _replace_product(product)
            attends = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
            for attention in graph.find_nodes(op="call_function", target=attends):
                _replace_attention(graph, attention)
            graph.eliminate_dead_code()

        def uuid(self) -> Any:
            return get_hash_for_files((__file__,))

    return ReplaceByKernels()


def _replace_product(product: Node) -> None:
    x, transposed = product.args
    assert isinstance(x, Node) and isinstance(transposed, Node)
    weight = transposed.args[0] if transposed.target is torch.ops.aten.permute.default else None
    rows = x.meta["val"]
    if isinstance(weight, Node) and rows.dtype == torch.float32 and takes_few_rows(len(rows), weight.meta["val"]):
        product.target, product.args = torch.ops.twoaxis.few_rows.default, (x, weight)


def _replace_attention(graph: Graph, attention: Node) -> None:
    """Its first result; the logarithms of the totals are for a backward pass."""
    given = *attention.args[:3], attention.kwargs.get("attn_mask")
    others_used = any(result.users for result in attention.users if result.args[1] != 0)
    if others_used or not all(isinstance(x, Node) for x in given):
        return
    q, k, v, mask = (x.meta["val"] for x in given if isinstance(x, Node))
    (B, H, queries, K), (G, S) = q.shape, k.shape[1:3]
    fits = queries == 1 and k.shape == (B, G, S, K) and v.shape[:3] == (B, G, S) and mask.shape in ((B, 1, 1, S), (1, 1, 1, S))
    plain = all(x.dtype == torch.float32 for x in (q, k, v, mask)) and not any(attention.args[3:])
    if not fits or not plain or H % G or H // G > library.MOST_TENSORS:
        return
    scale = attention.kwargs.get("scale")
    with graph.inserting_before(attention):
        target = torch.ops.twoaxis.decode_attention.default
        mixed = graph.call_function(target, (*given, K**-0.5 if scale is None else scale))
    mixed.meta["val"] = _empty_mixture(q, k, v, mask, 1.0)
    for result in [*attention.users]:
        result.replace_all_uses_with(mixed)
        graph.erase_node(result)
    graph.erase_node(attention)
