"""Bytes that cross each boundary between stages, in plain numbers.

Letters: P ranks, V stages of each rank, C = P*V stages, also called chunks. A leaf is [first boundary, last boundary, bytes
per token, ...]: one tensor of the depth state, where boundary i lies before sublayer i. `edges` are the C + 1 boundaries at
which the chunks begin, and the end.
"""


def even_cuts(blocks: int, chunks: int) -> list[int]:
    """The block at which each chunk begins, and the end; the first chunks get one block more where they do not divide.

    The last chunk has the head beside its blocks, so it is the one to get less.

    Example:
        >>> even_cuts(7, 3)
        [0, 3, 5, 7]
    """
    cuts = [0]
    for chunk in range(chunks):
        cuts.append(cuts[chunk] + blocks // chunks + (1 if chunk < blocks % chunks else 0))
    return cuts


def hop_bytes(leaves: list[list], edges: list[int], ranks: int, forwarding: str) -> list[int]:
    """Bytes per token that cross the boundary after each chunk but the last; the gradients that come back are as many.

    * `naive`: every boundary sends the whole state.
    * `cached`: a rank keeps the leaves that it has received for its earlier chunks, and is sent the others only.
    * `cached_own`: it also keeps those that it has made itself.

    Gradients of a kept leaf add up on the rank that keeps it and go back once, over the boundary that it came by, so both
    directions move the same tensors. Chunks of one rank send each other nothing.

    Equation: of sources that never change and N_p new ones in each chunk, P > 1:
              naive C (C - 1) / 2 N_p, cached (P (P - 1) / 2 + (V - 1) P^2) N_p,
              cached_own (P (P - 1) / 2 + (V - 1) P (P - 1)) N_p
    Source:   Attention Residuals, arXiv:2603.15031, on cross-stage caching, for naive and cached: it counts the increments
              since the chunk that the receiver had before, those of that chunk among them

    Example:
        >>> sources = [[0, 4, 1], [1, 4, 1], [2, 4, 1], [3, 4, 1], [4, 4, 1]]
        >>> [hop_bytes(sources, [0, 1, 2, 3, 4], 2, forwarding) for forwarding in ("naive", "cached", "cached_own")]
        [[2, 3, 4], [2, 3, 2], [2, 1, 1]]
    """
    hops = []
    for chunk in range(1, len(edges) - 1):
        total = 0
        for leaf in leaves:
            if ranks > 1 and alive(leaf, edges[chunk]) and not held(leaf, edges, chunk, ranks, forwarding):
                total += leaf[2]
        hops.append(total)
    return hops


def waiting_bytes(leaves: list[list], edges: list[int], ranks: int, forwarding: str) -> list[list[int]]:
    """Bytes per token of gradients that begin and that end to wait on a rank during the backward pass of each chunk.

    A rank that keeps a leaf for its later chunks adds up its gradient from the backward pass of the last of them, which runs
    first, to that of the chunk which the leaf came with.

    Returns:
        Bytes that begin to wait, then bytes that end to, by chunk.

    Example:
        >>> waiting_bytes([[0, 4, 1], [1, 4, 1]], [0, 1, 2, 3, 4], 2, "cached")
        [[0, 0, 0, 2], [0, 2, 0, 0]]
    """
    begun = [0 for _ in range(len(edges) - 1)]
    ended = [0 for _ in range(len(edges) - 1)]
    if ranks == 1 or forwarding == "naive":
        return [begun, ended]
    for leaf in leaves:
        for rank in range(ranks):
            first = -1
            last = -1
            chunk = rank
            while chunk < len(edges) - 1:
                entering = chunk > 0 and alive(leaf, edges[chunk])
                own = forwarding == "cached_own" and alive(leaf, edges[chunk + 1])
                if first < 0 and (entering or own):
                    first = chunk
                elif entering:
                    last = chunk
                chunk += ranks
            if last > 0:
                begun[last] += leaf[2]
                ended[first] += leaf[2]
    return [begun, ended]


def alive(leaf: list, boundary: int) -> bool:
    """Whether the state at a boundary holds a leaf."""
    return leaf[0] <= boundary and boundary <= leaf[1]


def held(leaf: list, edges: list[int], chunk: int, ranks: int, forwarding: str) -> bool:
    """Whether the rank of a chunk holds a leaf of the entering state from earlier chunks of its own.

    A leaf is in all states from its first to its last, so the chunk before on this rank tells of all earlier ones.
    """
    earlier = chunk - ranks
    if forwarding == "naive" or earlier < 0:
        return False
    if forwarding == "cached_own":
        return alive(leaf, edges[earlier + 1])
    return earlier > 0 and alive(leaf, edges[earlier])
