"""Bytes that collectives move in one step, in plain numbers.

Every function returns the bytes that one rank sends over its slowest link, for a ring of n ranks; a tensor of b bytes is
counted whole, before it is sharded. Letters: n ranks of a group, T tokens of a microbatch on one data rank, D width.
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

    * `none`: an all-reduce of [T, D] behind each sublayer in the forward pass, and one before it in the backward pass.
    * `tensor`: each all-reduce falls apart into an all-gather before the sublayer and a reduce-scatter behind it, which move
      as much; the backward pass gathers the saved input of the sublayer once more for the gradient of its weights.

    Equation: none 4 b (n - 1) / n, tensor 5 b (n - 1) / n, for each sublayer, b = T D numbers
    Source:   Megatron-LM, arXiv:1909.08053, section 3; Reducing Activation Recomputation, arXiv:2205.05198, section 4.2.2

    Example:
        >>> tensor_parallel_bytes(2, 1, 8, 4, 2, "none"), tensor_parallel_bytes(2, 1, 8, 4, 2, "tensor")
        (128.0, 160.0)
    """
    whole = tokens * d_model * element_bytes
    if sequence == "none":
        return sublayers * 2 * all_reduce_bytes(ranks, whole)
    return sublayers * (3 * all_gather_bytes(ranks, whole) + 2 * reduce_scatter_bytes(ranks, whole))


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
    """The all-reduce that parameters of the depth mixer cost under tensor parallelism, once in a step.

    They are whole on every rank. When a rank mixes its own part of the sequence only, its gradient of them lacks the tokens of
    the other ranks; without sequence parallelism every rank mixes all tokens and has the whole gradient.

    Equation: 2 b (n - 1) / n of the gradients with `tensor`, 0 with `none`
    """
    return all_reduce_bytes(ranks, parameters * gradient_bytes) if sequence == "tensor" else 0.0


def stored_tokens(tokens: int, chunk_tokens: int, ranks: int, sequence: str) -> int:
    """Tokens of one sequence whose depth state a tensor-parallel rank holds at once.

    The depth state of a token is needed only while this token passes through the stack, so a prefill in chunks holds one chunk
    of it. With sequence `tensor` a rank holds 1/n of those tokens: the reduce-scatter and the all-gather of tensor parallelism
    bracket the depth operation, which acts on each token by itself. With `none` every rank holds them all.

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
