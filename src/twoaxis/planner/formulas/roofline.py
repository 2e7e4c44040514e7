"""The roofline in plain numbers: seconds of operators, and of sublayers on one device.

An operator is the table that `operator` makes; rates are the table that `Device.numbers` gives, and a link the one that
`Link.numbers` gives. All rates are reached ones, not peaks.

`work` is one pass: `batch` sequences of `tokens` each after `context` earlier tokens (0 in training), on `tensor` ranks that
share every matrix, with `sequence` "tensor" if they also share the tokens between matrices, and `engine` "fused" (one kernel
for each depth read and write) or "eager" (one for each operation).
"""

from typing import Any

from twoaxis.planner.formulas.collectives import tensor_parallel_bytes
from twoaxis.planner.formulas.counts import pair_flops, pair_flops_of_one

Data = dict[str, Any]


def harmonic_size(rows: float, inner: float, columns: float) -> float:
    """The size of a matrix product [rows, inner] x [inner, columns], at most its smallest side.

    Equation: s = 1 / (1/m + 1/k + 1/n)

    Example:
        >>> harmonic_size(4096.0, 4096.0, 4096.0), round(harmonic_size(1.0, 4096.0, 4096.0), 3)
        (1365.3333333333333, 1.0)
    """
    return 1.0 / (1.0 / rows + 1.0 / inner + 1.0 / columns)


def matmul_efficiency(size: float, half_size: float) -> float:
    """The fraction of the rate of large matrix products at this harmonic size.

    Equation: e(s) = s / (s + h), so that seconds = (2 m k n + 2 h (m k + k n + m n)) / rate: a cost of the surface of the
              product, to pack, to fill pipelines and to write, is added to that of its volume. e(h) = 1/2

    Example:
        >>> matmul_efficiency(256.0, 256.0)
        0.5
    """
    return size / (size + half_size)


def operator(matmul_flops: float, size: float, vector_flops: float, bytes_moved: float, kernels: float) -> Data:
    """The table of one operator.

    Args:
        matmul_flops: multiplications and additions in matrix products.
        size: the harmonic size of these products; 0 for an operator without any.
        vector_flops: all other operations on numbers.
        bytes_moved: read and written, with nothing reused from earlier operators.
        kernels: number of kernel launches.
    """
    return {
        "matmul_flops": matmul_flops,
        "size": size,
        "vector_flops": vector_flops,
        "bytes": bytes_moved,
        "kernels": kernels,
    }


def compute_seconds(op: Data, rates: Data) -> float:
    """Seconds of the arithmetic of an operator."""
    seconds = op["vector_flops"] / rates["vector_flops_per_second"]
    if op["matmul_flops"] > 0:
        reached = rates["flops_per_second"] * matmul_efficiency(op["size"], rates["matmul_half_size"])
        seconds = seconds + op["matmul_flops"] / reached
    return seconds


def memory_seconds(bytes_moved: float, rates: Data) -> float:
    """Seconds to read and write so many bytes, at the rate of the smallest cache that holds them all, else of the memory.

    A cache that does not hold them all gives no speedup, since data is evicted before it is read again.

    Example:
        >>> rates = {"caches": [[1e6, 4e9], [1e9, 2e9]], "bytes_per_second": 1e9}
        >>> [memory_seconds(size, rates) for size in (1e6, 1e9, 3e9)]
        [0.00025, 0.5, 3.0]
    """
    rate = rates["bytes_per_second"]
    for cache in rates["caches"]:
        if bytes_moved <= cache[0]:
            rate = max(rate, cache[1])
    return bytes_moved / rate


def launch_seconds(op: Data, rates: Data) -> float:
    """Seconds of the kernel launches of an operator."""
    return op["kernels"] * rates["launch_seconds"]


def operator_seconds(op: Data, rates: Data) -> float:
    """Seconds of one operator: the slower of computing and moving, which overlap, and the launches.

    Equation: t = max(FLOPs / (peak efficiency), bytes / (bandwidth efficiency)) + kernels launch
    Source:   Roofline: An Insightful Visual Performance Model for Multicore Architectures, CACM 52(4), 2009; launches added

    Example:
        >>> rates = {"flops_per_second": 1e12, "matmul_half_size": 0.0, "vector_flops_per_second": 1e11, "caches": [],
        ...          "bytes_per_second": 1e9, "launch_seconds": 1e-3}
        >>> operator_seconds(operator(1e12, 100.0, 0.0, 2e9, 1.0), rates)
        2.001
    """
    return max(compute_seconds(op, rates), memory_seconds(op["bytes"], rates)) + launch_seconds(op, rates)


def total_seconds(operators: list[Data], rates: Data) -> float:
    """Seconds of operators that run one after the other."""
    seconds = 0.0
    for op in operators:
        seconds = seconds + operator_seconds(op, rates)
    return seconds


def fused(operators: list[Data], least_bytes: float) -> Data:
    """One kernel in place of several operators, with the least traffic.

    Args:
        operators: what it computes; matrix products in it keep their sizes on average.
        least_bytes: read and written if nothing in between is stored in memory.
    """
    matmul_flops = 0.0
    vector_flops = 0.0
    surface = 0.0
    for op in operators:
        matmul_flops = matmul_flops + op["matmul_flops"]
        vector_flops = vector_flops + op["vector_flops"]
        if op["matmul_flops"] > 0:
            surface = surface + op["matmul_flops"] / op["size"]
    size = 0.0
    if matmul_flops > 0:
        size = matmul_flops / surface
    return operator(matmul_flops, size, vector_flops, least_bytes, 1.0)


def bound(op: Data, rates: Data) -> str:
    """What bounds an operator: `compute`, `memory` or `launch`."""
    compute = compute_seconds(op, rates)
    memory = memory_seconds(op["bytes"], rates)
    return bound_by(compute, memory, launch_seconds(op, rates), 0.0)


def bound_by(compute: float, memory: float, launch: float, link: float) -> str:
    """The name of the largest of four times, the first of equal ones: `compute`, `memory`, `launch` or `link`.

    Example:
        >>> bound_by(1.0, 3.0, 2.0, 0.0)
        'memory'
    """
    name = "compute"
    largest = compute
    if memory > largest:
        name = "memory"
        largest = memory
    if launch > largest:
        name = "launch"
        largest = launch
    if link > largest:
        name = "link"
    return name


MIXER_KERNELS = 8
"""Launches of a mixer with its norm: two or three products, the attention or the activation, rotations, a norm, casts."""

DEPTH_KERNELS = 2
"""Launches of a fused depth operation: the read and the write."""

PRODUCT_COLUMNS = 64
"""Columns from which a product with parameters is a separate kernel, with another for what follows it: a kernel that streams
rows computes fewer sums on the way, while this many fill a tile of tensor cores."""


def tokens_on_rank(work: Data) -> float:
    """Tokens of which a rank processes inputs of sublayers and depth states between the matrices."""
    share = work["tensor"] if work["sequence"] == "tensor" else 1
    return work["batch"] * work["tokens"] / share


def pairs_of_work(sub: Data, work: Data) -> float:
    """FLOPs of attention over the visible pairs of a pass."""
    if work["context"] > 0:
        total = 0
        for step in range(work["tokens"]):
            total = total + pair_flops_of_one(sub, work["context"] + step)
        return work["batch"] * total
    return work["batch"] * pair_flops(sub, work["tokens"])


def weights_read(sub: Data, tokens: float) -> float:
    """Expected number of parameters of a mixer that a pass of so many tokens reads, with an even router and even hashes."""
    read = sub["params"]
    for chosen in [sub["routed"], sub["table"]]:
        if len(chosen) > 0:
            idle = chosen[0] * (1 - chosen[1] / chosen[0]) ** tokens
            read = read - idle * chosen[2]
    return read


def cache_read(sub: Data, work: Data) -> float:
    """Bytes of the cache of a mixer that a pass reads."""
    if work["context"] == 0:
        return 0
    total = sub["cache_fixed"]
    for part in sub["cache"]:
        total = total + part[0] * (work["context"] if part[1] == 0 else min(part[1], work["context"]))
    return total * work["batch"]


def mixer_operators(model: Data, sub: Data, work: Data) -> list[Data]:
    """The operators of the norms and the mixer of a sublayer on one rank, forward."""
    N = work["batch"] * work["tokens"]
    t = work["tensor"]
    D = model["d_model"]
    rows = N
    if len(sub["routed"]) > 0:
        rows = max(1, N * sub["routed"][1] / sub["routed"][0])
    size = harmonic_size(rows, D, D / t)
    # Products and elementwise operations alternate. Each tensor between them, of those saved for backward, is accessed by one
    # product, whose arithmetic hides the traffic, and by one elementwise operation, which hides none of it. The output of a
    # local mixer is accessed by elementwise operations on both sides.
    kept = N * sub["saved"] / t
    local = N * sub["local"][1] / t
    moved = kept - local + weights_read(sub, N) * model["weights_bytes"] / t + cache_read(sub, work) / t
    between = tokens_on_rank(work) * D * model["activations_bytes"] * 2 * sub["norms"]
    vector = N * sub["elementwise"] / t + tokens_on_rank(work) * sub["norms"] * model["norm_elementwise"]
    return [
        operator(N * sub["matmul"] / t, size, 0, moved, MIXER_KERNELS - 2),
        operator(pairs_of_work(sub, work) / t, harmonic_size(max(work["tokens"], 16), D, D), 0, 0, 1),
        operator(0, 0, vector, kept + local + between, sub["norms"] + sub["local"][0]),
    ]


def depth_operator(model: Data, depth: Data, work: Data, way: str) -> Data:
    """The operator of a depth operation on one rank, `way` being "forward" or "backward"."""
    N = tokens_on_rank(work)
    times = 1 if way == "forward" else 2
    vector = times * N * depth["elementwise"]
    matmul = times * (N * depth["matmul"] + depth["matmul_fixed"])
    D = model["d_model"]
    # One product with all columns: scores and low ranks are narrow, projections of depth attention are not.
    size = harmonic_size(N, D, max(1, depth["matmul"] / (2 * D)))
    if work["engine"] == "eager":
        kernels = depth["eager"] if way == "forward" else depth["eager_back"]
        return operator(matmul, size, vector, N * kernels[1] + kernels[2], kernels[0])
    # Backward reads the gradients of what was written and again what was read, and writes its gradients.
    moved = depth["read"] + depth["written"] if way == "forward" else depth["written"] + 2 * depth["read"]
    weights = times * depth["weights"] * model["weights_bytes"]
    # Scores of sources are products without a matrix of parameters.
    columns = min(depth["weights"], depth["matmul"] / 2) / D
    return operator(matmul, size, vector, N * moved + weights, DEPTH_KERNELS + (2 if columns >= PRODUCT_COLUMNS else 0))


def collective_seconds(sent_bytes: float, link: Data) -> float:
    """Seconds of a collective in which every rank sends so many bytes; 0 for no bytes."""
    if sent_bytes <= 0:
        return 0
    return sent_bytes / link["bytes_per_second"] + link["latency_seconds"]


def sublayer_seconds(model: Data, sub: Data, work: Data, rates: Data, link: Data) -> Data:
    """Seconds of one sublayer on one rank: forward and backward, by mixer, depth operation and tensor-parallel messages."""
    forward = 0
    backward = 0
    for op in mixer_operators(model, sub, work):
        forward = forward + operator_seconds(op, rates)
        twice = operator(2 * op["matmul_flops"], op["size"], 2 * op["vector_flops"], 2 * op["bytes"], 2 * op["kernels"])
        backward = backward + operator_seconds(twice, rates)
    depth = operator_seconds(depth_operator(model, sub["depth"], work, "forward"), rates)
    depth_back = operator_seconds(depth_operator(model, sub["depth"], work, "backward"), rates)
    sent = tensor_parallel_bytes(
        work["tensor"], 1, work["batch"] * work["tokens"], model["d_model"], model["activations_bytes"], work["sequence"]
    )
    shared = collective_seconds(sent / 2, link)
    return {"forward": forward, "backward": backward, "depth": depth, "depth_back": depth_back, "link": shared}


def head_seconds(model: Data, work: Data, rates: Data) -> Data:
    """Seconds of both ends of the stack and of the output head, forward and backward."""
    N = work["batch"] * work["tokens"]
    D = model["d_model"]
    V = model["vocab_size"] / work["tensor"]
    moved = D * V * model["weights_bytes"] + 2 * N * V * model["activations_bytes"]
    head = operator(2 * N * D * V, harmonic_size(N, D, V), 0, moved, 3)
    head_back = operator(4 * N * D * V, harmonic_size(N, D, V), 0, 2 * moved, 6)
    return {
        "forward": operator_seconds(head, rates),
        "backward": operator_seconds(head_back, rates),
        "depth": operator_seconds(depth_operator(model, model["ends"], work, "forward"), rates),
        "depth_back": operator_seconds(depth_operator(model, model["ends"], work, "backward"), rates),
        "link": 0,
    }
