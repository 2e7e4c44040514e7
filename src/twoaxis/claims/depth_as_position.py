"""Residual attention along depth in four forms: layer by layer, as ShortSWA over the transposed stack, and as plain loops.

Letters: B batch, T position, D width, L layers, H heads, K key width, R rows (tokens of the batch, or layers).
"""

import math
import random
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from twoaxis.core.layout import TokenLayout
from twoaxis.core.measure import noise
from twoaxis.core.position import LayerStack
from twoaxis.ops.depth_attention import depth_attention
from twoaxis.ops.local_attention import local_attention
from twoaxis.sequence import ShortSWAConfig

EDGES = ((1, 1, 2, 1, 2, 3), (5, 1, 4, 2, 2, 7), (70, 1, 2, 2, 4, 6))
"""L, B, T, H, K, D: a single layer, a width smaller than that of all heads, more layers than a chunk of the engine."""


def _sizes(drawn: int) -> tuple[tuple[int, ...], ...]:
    generator = random.Random(0)
    largest = (12, 2, 4, 4, 6, 9)
    return (*EDGES, *(_even_heads(generator.randint(1, most) for most in largest) for _ in range(drawn)))


def _even_heads(size: Iterable[int]) -> tuple[int, ...]:
    L, B, T, H, K, D = size
    return L, B, T, H, K + K % 2, D


SIZES = _sizes(drawn=7)


class DepthRead(NamedTuple):
    """States of L layers and one set of projections for all their reads.

    Attributes:
        states: [B T D] for each layer.
        project: [3HK D], queries above keys above values.
        output: [D HK].
        n_heads: H.
    """

    states: tuple[Float[Tensor, "B T D"], ...]
    project: Float[Tensor, "P D"]
    output: Float[Tensor, "D W"]
    n_heads: int

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """Tensors whose gradients are compared."""
        return (*self.states, self.project, self.output)


def random_read(case: int) -> DepthRead:
    """The states and projections of one case of `SIZES`."""
    L, B, T, H, K, D = SIZES[case]
    states = tuple(noise((B, T, D), f"claims/{case}/state {layer}").requires_grad_() for layer in range(L))
    project = noise((3 * H * K, D), f"claims/{case}/project").requires_grad_()
    return DepthRead(states, project, noise((D, H * K), f"claims/{case}/output").requires_grad_(), H)


def cotangents(read: DepthRead) -> list[Tensor]:
    """Cotangents of the results of all layers."""
    return [noise(tuple(x.shape), f"claims/cotangent {layer}") for layer, x in enumerate(read.states)]


def windows(layers: int) -> list[int | None]:
    """Windows from a layer's own state only to all states."""
    return [*sorted({1, 2, min(3, layers), max(1, layers // 2), layers}), None]


def layer_by_layer(read: DepthRead, window: int | None) -> list[Tensor]:
    """Attends from each layer to the states up to it, with one call per layer."""
    queries, keys, values = _heads(read)
    results = []
    for layer, q in enumerate(queries):
        # Tokens are rows of the batch, and layers are keys.
        along = [torch.stack(part[: layer + 1], dim=2).flatten(0, 1) for part in ([q], keys, values)]
        q, k, v = along[0][:, -1:], along[1], along[2]
        y = local_attention(*(part.transpose(1, 2) for part in (q, k, v)), window=window)
        results.append(_project_back(read, y.transpose(1, 2).flatten(2).squeeze(1)))
    return results


def depth_kernel(read: DepthRead, window: int | None) -> list[Tensor]:
    """As `layer_by_layer`, with the operator of the depth mixer `depth_attention`."""
    queries, keys, values = _heads(read)
    results = []
    for layer, q in enumerate(queries):
        first = 0 if window is None else max(0, layer + 1 - window)
        y = depth_attention(q, keys[first : layer + 1], values[first : layer + 1])
        results.append(_project_back(read, y.flatten(2)))
    return results


def transposed_short_swa(read: DepthRead, window: int | None) -> list[Tensor]:
    """Runs the sequence mixer `short_swa`, without rotation, on the stack with layers as positions."""
    L, (B, T, D) = len(read.states), read.states[0].shape
    H, W = read.n_heads, read.output.shape[1]
    config = ShortSWAConfig(window=window or L, rope_dim=0, n_heads=H, n_kv_heads=H, head_dim=W // H)
    mixer = config.build(LayerStack(D, 1e-6, (1,)).sites[0])
    stack = torch.stack(read.states, dim=2).reshape(B * T, L, D)
    weights = {"qkv.weight": read.project, "output.weight": read.output}
    update, _ = torch.func.functional_call(mixer, weights, (stack, TokenLayout.contiguous(L)))
    return list(update.reshape(B, T, L, D).unbind(2))


def plain_loops(read: DepthRead, window: int | None) -> list[Tensor]:
    """Computes the softmax in plain loops, with no operator of this library."""
    H, W = read.n_heads, read.output.shape[1]
    K = W // H
    rows = [x.reshape(-1, x.shape[-1]) for x in read.states]
    results = []
    for layer, x in enumerate(rows):
        mixed = []
        for r in range(x.shape[0]):
            heads = []
            for h in range(H):
                w_q, w_k, w_v = (read.project[part * W + h * K : part * W + (h + 1) * K] for part in range(3))
                first = 0 if window is None else max(0, layer - window + 1)
                weights = [torch.exp((w_q @ x[r]) @ (w_k @ rows[i][r]) / math.sqrt(K)) for i in range(first, layer + 1)]
                total = sum(weights[1:], weights[0])
                parts = [a / total * (w_v @ rows[first + i][r]) for i, a in enumerate(weights)]
                heads.append(sum(parts[1:], parts[0]))
            mixed.append(read.output @ torch.cat(heads))
        results.append(torch.stack(mixed).reshape(read.states[0].shape))
    return results


def _heads(read: DepthRead) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Queries, keys and values of every layer, [B T H K] each."""
    projected = [F.linear(x, read.project).unflatten(-1, (3, read.n_heads, -1)).unbind(2) for x in read.states]
    queries, keys, values = (list(part) for part in zip(*projected, strict=True))
    return queries, keys, values


def _project_back(read: DepthRead, y: Tensor) -> Tensor:
    return F.linear(y.reshape(*read.states[0].shape[:2], -1), read.output)
