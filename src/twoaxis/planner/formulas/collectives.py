"""Bytes of collectives in one step, and bytes over each boundary between stages, in plain numbers.

Every function of collectives returns the bytes that one rank sends over its slowest link, for a ring of n ranks; a tensor of
b bytes is counted whole, before it is sharded. Letters: n ranks of a group, T tokens of a microbatch on one data rank, D
width.

At boundaries: P ranks, V stages of each rank, C = P*V stages, also called chunks. A leaf is [first boundary, last boundary,
bytes per token, ...]: one tensor of the depth state, where boundary i lies before sublayer i. `edges` are the C + 1
boundaries at which the chunks begin, and the end.
"""


def all_gather_bytes(ranks: int, whole_bytes: float) -> float:
    """A ring that gathers the shards of a tensor; one that reduces and scatters a tensor sends as much.

    Equation: b (n - 1) / n
    Source:   Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, J. Parallel Distrib. Comput. 69, 2009

    Example:
        >>> all_gather_bytes(4, 100)
        75.0
    """
    return whole_bytes * (ranks - 1) / ranks


def reduce_scatter_bytes(ranks: int, whole_bytes: float) -> float:
    """A ring that reduces a tensor and leaves one shard of it on each rank.

    Equation: b (n - 1) / n
    Source:   as `all_gather_bytes`
    """
    return whole_bytes * (ranks - 1) / ranks


def all_reduce_bytes(ranks: int, whole_bytes: float) -> float:
    """A ring that reduces and scatters a tensor, then gathers it.

    Equation: 2 b (n - 1) / n
    Source:   as `all_gather_bytes`

    Example:
        >>> all_reduce_bytes(4, 100)
        150.0
    """
    return 2 * whole_bytes * (ranks - 1) / ranks


def tensor_parallel_bytes(ranks: int, sublayers: int, tokens: float, d_model: int, element_bytes: int, sequence: str) -> float:
    """Activations and their gradients in the forward and the backward pass of one microbatch.

    * `none`: an all-reduce of [T, D] after each sublayer in the forward pass, and one before it in the backward pass.
    * `tensor`: each all-reduce becomes an all-gather before the sublayer and a reduce-scatter after it, which move as much;
      the backward pass gathers the saved input of the sublayer once more for the gradient of its weights.

    Equation: none 4 b (n - 1) / n, tensor 5 b (n - 1) / n, for each sublayer, b = T D numbers
    Source:   Megatron-LM, arXiv:1909.08053, section 3; Reducing Activation Recomputation, arXiv:2205.05198, section 4.2.2

    Example:
        >>> tensor_parallel_bytes(2, 1, 8, 4, 2, "none"), tensor_parallel_bytes(2, 1, 8, 4, 2, "tensor")
        (128.0, 160.0)
    """
    whole = tokens * d_model * element_bytes
    again = all_gather_bytes(ranks, whole) if sequence == "tensor" else 0
    return sublayers * (2 * all_reduce_bytes(ranks, whole) + again)


def tensor_parallel_forward_bytes(ranks: int, sublayers: int, tokens: float, d_model: int, element_bytes: int) -> float:
    """Activations in the forward pass alone, which are as many with either `sequence` of `tensor_parallel_bytes`.

    Equation: 2 b (n - 1) / n for each sublayer, b = T D numbers
    Source:   as `tensor_parallel_bytes`

    Example:
        >>> tensor_parallel_forward_bytes(2, 1, 8, 4, 2)
        64.0
    """
    return sublayers * all_reduce_bytes(ranks, tokens * d_model * element_bytes)


def data_parallel_bytes(
    ranks: int, parameters: float, gradient_bytes: int, weight_bytes: int, microbatches: int, sharding: str
) -> float:
    """Gradients and weights of one step on one rank of a data-parallel group.

    * `none`: one all-reduce of the gradients.
    * `optimizer`: reduce-scatter of the gradients, then all-gather of the new weights.
    * `weights`: weights are gathered for the forward and again for the backward pass of every microbatch, and gradients are
      reduced and scattered after each.

    Source: ZeRO, arXiv:1910.02054, section 7 (stages 1 and 3); `weights` as torch.distributed.fsdp.fully_shard runs it

    Args:
        ranks: n.
        parameters: on this rank before sharding.
        gradient_bytes: of one gradient as it is sent.
        weight_bytes: of one weight as it is sent.
        microbatches: of a step.
        sharding: what is sharded over the group.
    """
    gradients = parameters * gradient_bytes
    weights = parameters * weight_bytes
    if sharding == "none":
        return all_reduce_bytes(ranks, gradients)
    if sharding == "optimizer":
        return reduce_scatter_bytes(ranks, gradients) + all_gather_bytes(ranks, weights)
    return microbatches * (2 * all_gather_bytes(ranks, weights) + reduce_scatter_bytes(ranks, gradients))


def mixing_gradient_bytes(ranks: int, parameters: float, gradient_bytes: int, sequence: str) -> float:
    """The all-reduce of gradients of depth mixers under tensor parallelism, once per step.

    Their parameters are whole on every rank. With sequence parallelism a rank mixes its part of the sequence, so its gradient
    lacks the tokens of the other ranks; without, every rank mixes all tokens and has the whole gradient.

    Equation: 2 b (n - 1) / n of the gradients with `tensor`, 0 with `none`
    """
    return all_reduce_bytes(ranks, parameters * gradient_bytes) if sequence == "tensor" else 0.0


def stored_tokens(tokens: int, chunk_tokens: int, ranks: int, sequence: str) -> int:
    """Tokens of one sequence whose depth state a tensor-parallel rank holds at once.

    The depth state of a token is needed only while this token passes through the stack, so a prefill in chunks holds that of
    one chunk. With sequence `tensor` a rank holds 1/n of those tokens, since the depth operation acts on each token separately,
    between the reduce-scatter and the all-gather of tensor parallelism. With `none` every rank holds them all.

    Source: Attention Residuals, arXiv:2603.15031, on prefill with long contexts

    Args:
        tokens: of the sequence.
        chunk_tokens: of one chunk of the prefill; 0 for a prefill in one.
        ranks: n.
        sequence: `none` or `tensor`.
    """
    held = min(tokens, chunk_tokens) if chunk_tokens > 0 else tokens
    return (held + ranks - 1) // ranks if sequence == "tensor" else held


def stored_bytes(state_bytes: float, tokens: int, chunk_tokens: int, ranks: int, sequence: str) -> float:
    """Bytes of depth state that a tensor-parallel rank holds during the prefill of one sequence.

    Equation: N_s D e ceil(min(T, c) / n) for N_s sources of D numbers of e bytes and chunks of c tokens
    Source:   Attention Residuals, arXiv:2603.15031, on prefill: 15 GB at 128k tokens, 1.9 GB on each of 8 ranks, below
              0.3 GB with chunks of 16k, which are 8 sources of D = 7168 in bfloat16 without the embedding

    Args:
        state_bytes: of the depth state of one token.
        tokens: of the sequence.
        chunk_tokens: of one chunk of the prefill; 0 for a prefill in one.
        ranks: n.
        sequence: `none` or `tensor`.

    Example:
        >>> [round(stored_bytes(8 * 7168 * 2, 2**17, c, n, "tensor") / 1e9, 2) for c, n in ((0, 1), (0, 8), (2**14, 8))]
        [15.03, 1.88, 0.23]
    """
    return state_bytes * stored_tokens(tokens, chunk_tokens, ranks, sequence)


def even_cuts(blocks: int, chunks: int) -> list[int]:
    """The block at which each chunk begins, and the end; the first chunks take the blocks that remain.

    The last chunk takes none of them, since it also has the head.

    Example:
        >>> even_cuts(7, 3)
        [0, 3, 5, 7]
    """
    cuts = [0]
    for chunk in range(chunks):
        cuts.append(cuts[chunk] + blocks // chunks + (1 if chunk < blocks % chunks else 0))
    return cuts


def hop_bytes(leaves: list[list], edges: list[int], ranks: int, forwarding: str) -> list[int]:
    """Bytes per token over the boundary after each chunk but the last; the gradients back have as many.

    * `naive`: every boundary sends the whole state.
    * `cached`: a rank keeps the leaves that it has received for its earlier chunks, and receives the others only.
    * `cached_own`: it also keeps the leaves that it has computed.

    Gradients of a kept leaf accumulate on the rank that keeps it and return once, over the boundary that the leaf crossed, so
    both directions move the same tensors. Chunks of one rank send each other nothing.

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
    """Bytes per token of gradients that start and that stop accumulating on a rank in the backward pass of each chunk.

    A rank that keeps a leaf for its later chunks accumulates its gradient from the backward pass of the last of them, which
    runs first, to that of the chunk with which the leaf arrived.

    Returns:
        Bytes that start to accumulate, then bytes that stop, by chunk.

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

    A leaf is in all states from its first to its last, so the previous chunk of this rank stands for all earlier ones.
    """
    earlier = chunk - ranks
    if forwarding == "naive" or earlier < 0:
        return False
    if forwarding == "cached_own":
        return alive(leaf, edges[earlier + 1])
    return earlier > 0 and alive(leaf, edges[earlier])
