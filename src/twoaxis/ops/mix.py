"""Weighted sums of depth sources, for one or several readers in one pass over the sources, forward and backward.

Rows are swept in blocks, so that sums and products stay in the cache while the sources stream by. Sources are a sequence of
separate tensors: a stack would copy the whole history at every read, and autograd would keep every copy.

Letters: B batch, T position, D width, H heads, S depth sources, Q queries, C ways (results). Everything that is not a source
or its gradient is in the precision of statistics.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from twoaxis.core import measure
from twoaxis.core.errors import ConfigError
from twoaxis.ops.precision import Impl, outside_autocast, runs_plain, statistics_dtype

BLOCK_NUMBERS = 2**17
"""Numbers of one tensor in a block per thread: three of them fit the second-level cache of a common core in float32."""

Source = Float[Tensor, "B T D"]
PerHead = Float[Tensor, "S Q B T H"]


def by_head(x: Tensor, n_heads: int) -> Tensor:
    """Reshapes [* D] to [* H D/H]; one head needs no axis."""
    return x if n_heads == 1 else x.unflatten(-1, (n_heads, -1))


def spread(weight: Tensor) -> Tensor:
    """Aligns [* H] with the result of `by_head`."""
    return weight if weight.shape[-1] == 1 else weight.unsqueeze(-1)


def head_sums(x: Tensor, n_heads: int) -> Tensor:
    """Returns the sum over each head: [* H]."""
    return x.sum(-1, keepdim=True) if n_heads == 1 else by_head(x, n_heads).sum(-1)


@outside_autocast
def raw_scores(sources: Sequence[Source], queries: Float[Tensor, "Q *each D"], n_heads: int) -> PerHead:
    """Returns every query, the same for all tokens or one for each, times every source, per head."""
    shape = sources[0].shape
    if n_heads == 1 and queries.ndim == 2:
        # One product per source serves all queries.
        rows = (v.to(queries.dtype).reshape(-1, shape[-1]) for v in sources)
        return torch.stack([torch.mm(queries, row.T) for row in rows]).reshape(len(sources), -1, *shape[:-1], 1)
    buffer = torch.empty(shape, dtype=queries.dtype, device=queries.device)
    return torch.stack(
        [torch.stack([head_sums(torch.mul(v, query, out=buffer), n_heads) for query in queries]) for v in sources]
    )


def mixtures(sources: Sequence[Source], weights: PerHead) -> list[Source]:
    """Returns for each query the sum of the sources times its weights."""
    H = weights.shape[-1]
    results = [torch.empty(sources[0].shape, dtype=weights.dtype, device=weights.device) for _ in range(weights.shape[1])]
    cut = _Cut(results[0])
    for totals, parts, ways in zip(cut.heads(results, H), cut.heads(sources, H), cut.weights(weights), strict=True):
        for total, way in zip(totals, ways[0], strict=True):
            torch.mul(parts[0], way, out=total)
        for part, weight in zip(parts[1:], ways[1:], strict=True):
            for total, way in zip(totals, weight, strict=True):
                total.addcmul_(part, way)
    return results


def products(sources: Sequence[Source], grads: Sequence[Source], n_heads: int) -> PerHead:
    """For each source and query, the sum over each head of the source times the gradient of the mixture."""
    cut, blocks = _Cut(grads[0]), []
    for parts, ways in zip(cut.heads(sources, n_heads), cut.heads(grads, n_heads), strict=True):
        buffer = torch.empty_like(ways[0])
        keep = n_heads == 1
        blocks.append(torch.stack([torch.mul(v, grad, out=buffer).sum(-1, keepdim=keep) for v in parts for grad in ways]))
    found = blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=1)
    return found.reshape(len(sources), len(grads), *grads[0].shape[:-1], n_heads)


def source_gradients(
    sources: Sequence[Source],
    grads: Sequence[Source],
    weights: PerHead,
    queries: Float[Tensor, "Q *each D"] | None = None,
    by_score: PerHead | None = None,
    along: Float[Tensor, "S B T"] | None = None,
) -> list[Source]:
    """Returns the gradient of each source: through the mixtures, through the scores, and along itself."""
    H = weights.shape[-1]
    # Separate tensors: autograd accumulates in place only into gradients that are not views.
    results = [torch.empty(v.shape, dtype=weights.dtype, device=v.device) for v in sources]
    cut = _Cut(results[0])
    ways, scores = cut.weights(weights), [None] * cut.n if by_score is None else cut.weights(by_score)
    asked, own = [()] * cut.n, [None] * cut.n
    if queries is not None:
        asked = cut.heads(list(queries), H) if queries.ndim > 2 else [by_head(queries, H).unbind()] * cut.n
    if along is not None:
        own = cut.weights(along.unsqueeze(1).unsqueeze(-1).expand(-1, -1, -1, -1, H))
    rows = cut.heads(sources, H)
    for block, (totals, parts) in enumerate(zip(cut.heads(results, H), cut.heads(grads, H), strict=True)):
        score, itself = scores[block], own[block]
        for index, total in enumerate(totals):
            weight = ways[block][index]
            torch.mul(parts[0], weight[0], out=total)
            for part, way in zip(parts[1:], weight[1:], strict=True):
                total.addcmul_(part, way)
            if score is not None:
                for query, way in zip(asked[block], score[index], strict=True):
                    total.addcmul_(way, query)
            if itself is not None:
                total.addcmul_(rows[block][index], itself[index][0])
    return [result.to(v.dtype) for v, result in zip(sources, results, strict=True)]


@outside_autocast
def query_gradients(sources: Sequence[Source], by_score: PerHead, each: bool) -> Float[Tensor, "Q *each D"]:
    """For each query, the sum over sources (and tokens, unless each has its own) of the source times its score's gradient."""
    _, Q, _, _, H = by_score.shape
    if each:
        totals = [torch.zeros(v.shape, dtype=by_score.dtype, device=v.device) for v in sources[:1] for _ in range(Q)]
        for v, ways in zip(sources, by_score, strict=True):
            for total, way in zip(totals, ways, strict=True):
                by_head(total, H).addcmul_(by_head(v, H), spread(way))
        return torch.stack(totals)
    total = torch.zeros((), dtype=by_score.dtype, device=by_score.device)
    for v, ways in zip(sources, by_score, strict=True):
        # A product per sequence, so that all cores take part; only the products of each head with its own slice are kept.
        rows = ways.permute(1, 0, 3, 2).flatten(1, 2)
        total = total + torch.bmm(rows, v.to(rows.dtype)).sum(0)
    if H == 1:
        return total
    return total.unflatten(0, (Q, H)).unflatten(-1, (H, -1)).diagonal(0, 1, 2).transpose(1, 2).flatten(1)


class _Cut:
    """The blocks of rows into which all tensors like this one are cut."""

    def __init__(self, like: Source) -> None:
        self.rows, width = like.numel() // like.shape[-1], like.shape[-1]
        step = BLOCK_NUMBERS * torch.get_num_threads() // width if like.device.type == "cpu" else self.rows
        self.step = max(1, min(step, self.rows))
        self.n = -(-self.rows // self.step)

    def heads(self, tensors: Sequence[Source], n_heads: int) -> list[tuple[Tensor, ...]]:
        """For each block, its rows of every tensor by head."""
        rows = [by_head(x.reshape(self.rows, -1), n_heads).split(self.step) for x in tensors]
        return list(zip(*rows, strict=True))

    def weights(self, per_head: PerHead) -> list[list[tuple[Tensor, ...]]]:
        """For each block, its rows of every weight, aligned with `heads`: [source][query]."""
        blocks = spread(per_head.flatten(2, 3)).split(self.step, dim=2)
        return [[ways.unbind() for ways in block.unbind()] for block in blocks]


NUMBERS_IN_CACHE = 2**16
"""Numbers of one source in a block, in the backward pass of many ways."""


@outside_autocast
def mix(
    sources: Sequence[Float[Tensor, "B T D"]], weights: Float[Tensor, "C S *each"], impl: Impl = "fused"
) -> tuple[Float[Tensor, "B T D"], ...]:
    """Returns one weighted sum of the sources for each way.

    Equation: y_c = sum_s w_cs * v_s, with w_cs one number, one per token ("B T") or one per feature ("D")
    Shapes:   weights in the precision of statistics; each y_c in the dtype of the sources, rounded once
    Cost:     flops 2*D per source, way and token; saves the sources and the weights

    Raises:
        ConfigError: no source, or weights for another number of sources.

    Example:
        >>> v = torch.ones(1, 1, 2), torch.full((1, 1, 2), 10.0)
        >>> mix(v, torch.tensor([[1.0, 2.0], [0.5, 0.0]]))
        (tensor([[[21., 21.]]]), tensor([[[0.5000, 0.5000]]]))
    """
    if not sources or weights.shape[1] != len(sources):
        raise ConfigError(f"mix: got {len(sources)} sources and weights for {weights.shape[1]}; give one weight per source")
    if runs_plain(impl):
        wide = weights.to(statistics_dtype(sources[0]))
        return tuple(_plain(sources, way) for way in wide)
    return _Mix.apply(weights, *sources)


def _plain(sources: Sequence[Tensor], weights: Tensor) -> Tensor:
    total = _aligned(weights[0]) * sources[0]
    for v, weight in zip(sources[1:], weights[1:], strict=True):
        total = total + _aligned(weight) * v
    return total.to(sources[0].dtype)


def _aligned(weight: Tensor) -> Tensor:
    """One per feature as it is; one number or one per token with an axis for the features."""
    # Type promotion ignores a tensor without axes: products with a half-precision source would stay in its precision.
    return weight if weight.ndim == 1 else weight.unsqueeze(-1)


class _Mix(torch.autograd.Function):
    """One buffer per way in the forward pass, one sweep over the sources in the backward pass."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, *sources: Tensor) -> tuple[Tensor, ...]:
        wide = weights.to(statistics_dtype(sources[0]))
        ctx.save_for_backward(weights, *sources)
        totals = [torch.mul(sources[0], _aligned(way[0])) for way in wide]
        computed = measure.ways(zip(totals, wide, strict=True))
        for s, v in enumerate(sources[1:], start=1):
            for total, way in computed:
                total.addcmul_(v, _aligned(way[s]))
        return tuple(total.to(sources[0].dtype) for total in totals)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        weights, *sources = ctx.saved_tensors
        wide = weights.to(statistics_dtype(sources[0]))
        if wide.ndim == 4 and len(wide) > 2 and wide.device.type == "cpu":
            by_weight, by_source = _by_token(wide, grad_outputs, sources)
            return by_weight.to(weights.dtype), *by_source
        grads = [grad.to(wide.dtype) for grad in grad_outputs]
        grad_weights = torch.empty_like(wide) if ctx.needs_input_grad[0] else None
        buffer = torch.empty_like(grads[0]) if wide.ndim > 2 else None
        grad_sources: list[Tensor | None] = []
        for s, v in enumerate(sources):
            if grad_weights is not None:
                for c, grad in enumerate(grads):
                    grad_weights[c, s] = _weight_gradient(grad, v, wide.ndim, buffer)
            if not ctx.needs_input_grad[1 + s]:
                grad_sources.append(None)
                continue
            grad_v = grads[0] * _aligned(wide[0, s])
            for grad, way in zip(grads[1:], wide[1:], strict=True):
                grad_v.addcmul_(grad, _aligned(way[s]))
            grad_sources.append(grad_v.to(v.dtype))
        return None if grad_weights is None else grad_weights.to(weights.dtype), *grad_sources


@outside_autocast
def _by_token(wide: Tensor, grads: Sequence[Tensor], sources: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Both gradients as one small matrix product per token each: dW = G V^T and dV = W^T G.

    With several ways a product reuses loaded data, which outweighs copying sources next to each other, some rows at a time.
    """
    (C, S), D = wide.shape[:2], sources[0].shape[-1]
    given, results = [v.reshape(-1, D) for v in sources], [g.reshape(-1, D) for g in grads]
    N = len(given[0])
    rows = max(1, min(N, NUMBERS_IN_CACHE // D))
    by_row = wide.flatten(2).permute(2, 1, 0).contiguous()
    grad_weights = wide.new_empty(N, C, S)
    grad_sources = [torch.empty(v.shape, dtype=v.dtype, device=v.device) for v in given]
    V, G = wide.new_empty(rows, S, D), wide.new_empty(rows, C, D)
    for start in range(0, N, rows):
        piece = slice(start, min(start + rows, N))
        v, g = V[: piece.stop - start], G[: piece.stop - start]
        for s, source in enumerate(given):
            v[:, s].copy_(source[piece])
        for c, result in enumerate(results):
            g[:, c].copy_(result[piece])
        torch.bmm(g, v.transpose(1, 2), out=grad_weights[piece])
        torch.bmm(by_row[piece], g, out=v)
        for s, grad_source in enumerate(grad_sources):
            grad_source[piece].copy_(v[:, s])
    shaped = [grad.view(v.shape) for grad, v in zip(grad_sources, sources, strict=True)]
    return grad_weights.permute(1, 2, 0).reshape(wide.shape), shaped


def _weight_gradient(grad: Tensor, v: Tensor, ndim: int, buffer: Tensor | None) -> Tensor:
    if ndim == 2:
        return torch.dot(grad.reshape(-1), v.to(grad.dtype).reshape(-1))
    product = torch.mul(grad, v, out=buffer)
    return product.sum(-1) if ndim == 4 else product.sum((0, 1))
