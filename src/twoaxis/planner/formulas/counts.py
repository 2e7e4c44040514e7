"""Parameters, FLOPs and bytes of a model from its coefficients, see `planner.coefficients`."""

from typing import Any

Data = dict[str, Any]


def visible_pairs_of(tokens: float, window: int) -> float:
    """(query, key) pairs of causal attention over a window that includes the query; 0 is no window."""
    width = tokens if window == 0 else min(window, tokens)
    return width * (width + 1) / 2 + (tokens - width) * width


def pair_flops(sublayer: Data, tokens: float) -> float:
    """FLOPs of one forward pass over one sequence in products of queries and keys, and of weights and values."""
    total = 0
    for pair in sublayer["pairs"]:
        total = total + pair[0] * visible_pairs_of(tokens, pair[1])
    return total


def pair_flops_of_one(sublayer: Data, context: float) -> float:
    """The same for one more token after a context."""
    return pair_flops(sublayer, context + 1) - pair_flops(sublayer, context)


def forward_counts(model: Data, batch: float, tokens: float) -> Data:
    """FLOPs of one forward pass, by kind."""
    N = batch * tokens
    matmul = N * 2 * model["d_model"] * model["vocab_size"]
    elementwise = N * model["norm_elementwise"]
    pairs = 0
    depth = N * (model["ends"]["matmul"] + model["ends"]["elementwise"]) + model["ends"]["matmul_fixed"]
    for sub in model["sublayers"]:
        matmul = matmul + N * sub["matmul"]
        pairs = pairs + batch * pair_flops(sub, tokens)
        elementwise = elementwise + N * (sub["elementwise"] + sub["norms"] * model["norm_elementwise"])
        depth = depth + N * (sub["depth"]["matmul"] + sub["depth"]["elementwise"]) + sub["depth"]["matmul_fixed"]
    return {
        "matmul": matmul,
        "pairs": pairs,
        "elementwise": elementwise,
        "depth": depth,
        "all": matmul + pairs + elementwise + depth,
    }


def parameter_counts(model: Data) -> Data:
    """Parameters: all, used by one token, of the depth operation, of the embedding and the head."""
    matrix = model["vocab_size"] * model["d_model"]
    ends = matrix if model["tied"] > 0 else 2 * matrix
    depth = model["ends"]["params"]
    total = ends + model["norm_params"]
    idle = 0
    for sub in model["sublayers"]:
        depth = depth + sub["depth"]["params"]
        total = total + sub["params"] + sub["norms"] * model["norm_params"]
        for chosen in [sub["routed"], sub["table"]]:
            if len(chosen) > 0:
                idle = idle + (chosen[0] - chosen[1]) * chosen[2]
    return {"all": total + depth, "used": total + depth - idle, "depth": depth, "embedding_and_head": ends}


def state_bytes(model: Data, boundary: int) -> float:
    """Bytes per token of the depth state before a sublayer."""
    total = 0
    for leaf in model["leaves"]:
        if leaf[0] <= boundary and boundary <= leaf[1]:
            total = total + leaf[2]
    return total


def new_state_bytes(model: Data, earlier: int, later: int) -> float:
    """Bytes per token of the state at a later boundary that did not exist at an earlier one."""
    total = 0
    for leaf in model["leaves"]:
        if leaf[0] > earlier and leaf[0] <= later and later <= leaf[1]:
            total = total + leaf[2]
    return total


def boundary_of_block(model: Data, block: int) -> int:
    """The first sublayer of a block; the number of sublayers for the block after the last."""
    for index in range(len(model["sublayers"])):
        if model["sublayers"][index]["block"] >= block:
            return index
    return len(model["sublayers"])


def kept_leaf_bytes(model: Data, first: int, last: int) -> float:
    """Bytes per token of tensors of states that are saved for backward, made by sublayers `first` to `last` - 1."""
    total = 0
    for leaf in model["leaves"]:
        made = leaf[0] > first or (first == 0 and leaf[0] == 0)
        if made and leaf[0] <= last and leaf[3] > 0:
            total = total + leaf[2]
    return total


def saved_bytes_of(model: Data, first: int, last: int, tokens: float) -> float:
    """Bytes saved for backward by sublayers `first` to `last` - 1."""
    total = tokens * kept_leaf_bytes(model, first, last)
    for index in range(first, last):
        sub = model["sublayers"][index]
        total = total + tokens * (sub["saved"] + sub["depth"]["saved"]) + sub["saved_fixed"] + sub["depth"]["saved_fixed"]
    return total


def recomputed_bytes_of(model: Data, first: int, last: int, tokens: float) -> float:
    """Bytes saved for backward between two boundaries if blocks are recomputed: the states between blocks."""
    total = 0
    before = first
    for index in range(first + 1, last + 1):
        if index == last or model["sublayers"][index]["block"] != model["sublayers"][before]["block"]:
            total = total + new_state_bytes(model, before, index)
            before = index
    if first == 0:
        total = total + state_bytes(model, 0)
    return total * tokens


def largest_block_bytes(model: Data, first: int, last: int, tokens: float) -> float:
    """Bytes saved for backward by the largest block between two boundaries, which recomputing it adds."""
    largest = 0
    before = first
    for index in range(first + 1, last + 1):
        if index == last or model["sublayers"][index]["block"] != model["sublayers"][before]["block"]:
            largest = max(largest, saved_bytes_of(model, before, index, tokens))
            before = index
    return largest


def ends_saved_bytes(model: Data, tokens: float, tensor_ranks: int) -> float:
    """Bytes saved for backward by both ends of the stack, the last norm and the loss, which saves gradients, not logits.

    Args:
        model: coefficients.
        tokens: of the pass.
        tensor_ranks: that share the head.
    """
    width = model["d_model"]
    statistic = max(4, model["activations_bytes"])
    each = model["ends"]["saved"] + width * model["activations_bytes"] + statistic
    return tokens * each + model["ends"]["saved_fixed"] + width * model["vocab_size"] * statistic / tensor_ranks


def cache_bytes_of(model: Data, tokens: float) -> float:
    """Bytes of the caches of one sequence in generation."""
    total = model["ends"]["cache_fixed"]
    for sub in model["sublayers"]:
        total = total + sub["cache_fixed"] + sub["depth"]["cache_fixed"]
        for part in sub["cache"]:
            total = total + part[0] * (tokens if part[1] == 0 else min(part[1], tokens))
    return total
