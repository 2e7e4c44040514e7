"""Sweeps over depth sources, in both directions, for one or several queries: what the fused depth reads are made of.

Rows are swept in blocks, so that what is accumulated and what is multiplied stay in the cache while the sources stream by.

Letters: B batch, T position, D width, H heads, S depth sources, Q queries. Everything that is not a source or its gradient is
in the precision of statistics.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from twoaxis.ops.precision import outside_autocast

BLOCK_NUMBERS = 2**17
"""Numbers of one tensor in a block per thread: three of them fit the second-level cache of a common core in float32."""

Source = Float[Tensor, "B T D"]
PerHead = Float[Tensor, "S Q B T H"]


def by_head(x: Tensor, n_heads: int) -> Tensor:
    """[* D] as [* H D/H]; one head needs no axis."""
    return x if n_heads == 1 else x.unflatten(-1, (n_heads, -1))


def spread(weight: Tensor) -> Tensor:
    """[* H] beside what `by_head` returns."""
    return weight if weight.shape[-1] == 1 else weight.unsqueeze(-1)


def head_sums(x: Tensor, n_heads: int) -> Tensor:
    """The sum over each head: [* H]."""
    return x.sum(-1, keepdim=True) if n_heads == 1 else by_head(x, n_heads).sum(-1)


@outside_autocast
def raw_scores(sources: Sequence[Source], queries: Float[Tensor, "Q *each D"], n_heads: int) -> PerHead:
    """Every query, the same for all tokens or one for each, times every source, per head."""
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
    """For each query, the sum of the sources times its weights."""
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
    """The gradient of each source: through the mixtures, through the scores, and along itself."""
    H = weights.shape[-1]
    # Tensors of their own: autograd adds in place only to gradients that are no views.
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
        # A product per sequence, so that all cores take part; of all heads only each with its own slice is wanted.
        rows = ways.permute(1, 0, 3, 2).flatten(1, 2)
        total = total + torch.bmm(rows, v.to(rows.dtype)).sum(0)
    if H == 1:
        return total
    return total.unflatten(0, (Q, H)).unflatten(-1, (H, -1)).diagonal(0, 1, 2).transpose(1, 2).flatten(1)


class _Cut:
    """How the rows of all tensors like this one are cut into blocks."""

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
        """For each block, its rows of every weight beside what `heads` returns: [source][query]."""
        blocks = spread(per_head.flatten(2, 3)).split(self.step, dim=2)
        return [[ways.unbind() for ways in block.unbind()] for block in blocks]
