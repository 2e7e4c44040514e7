"""What n residual streams side by side hold and move; at first all of them are one tensor, the embeddings.

Letters: D width, n streams.
"""

from twoaxis.core.site import Site, Stack
from twoaxis.core.state import Flow, Leaf, Numbers, stream


def stream_leaves(stack: Stack, index: int, n: int, keeps_last: bool) -> tuple[Leaf, ...]:
    """The streams that enter sublayer `index`.

    Args:
        stack: all sublayers.
        index: the sublayer, or `n_sublayers` for the streams that are left.
        n: streams.
        keeps_last: whether autograd keeps the streams that are left.

    Example:
        >>> [leaf.name for leaf in stream_leaves(Stack(8, 1e-6, (1, 1)), 0, 2, keeps_last=False)]
        ['embedding', 'embedding']
    """
    D = Numbers(stack.d_model)
    if index == 0:
        return (stream(stack.d_model, 0),) * n
    kept = keeps_last or index < stack.n_sublayers
    return tuple(Leaf(f"stream {j} of sublayer {index - 1}", D, kept) for j in range(n))


def streams_flow(site: Site, n: int, weights: Numbers) -> Flow:
    """One sum of the streams is read, then each of them becomes a sum of all streams and the update.

    Args:
        site: the sublayer.
        n: streams.
        weights: of each token, which the read makes and the write takes.

    Example:
        >>> streams_flow(Stack(8, 1e-6, (1, 1)).sites[1], 4, Numbers()).moved.model // 8
        14
    """
    D, tensors = Numbers(site.d_model), n if site.index else 1
    return Flow(read=D * (2 * tensors + 1) + weights, written=D * (1 + n) + weights, views=D, keeps_update=True)


def streams_left(stack: Stack, n: int) -> Flow:
    """One sum of the streams is left."""
    D = Numbers(stack.d_model)
    return Flow(read=D * n, written=D, views=D)
