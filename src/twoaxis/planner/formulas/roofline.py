"""Seconds of operators from what they compute and move: the roofline, in plain numbers.

An operator is the table that `operator` makes; rates are the table that `Device.numbers` gives, and a link the one that
`Link.numbers` gives. All rates are those that are reached, not peaks.
"""

from typing import Any

Data = dict[str, Any]


def harmonic_size(rows: float, inner: float, columns: float) -> float:
    """The size of a matrix product [rows, inner] x [inner, columns], which its smallest side bounds.

    Equation: s = 1 / (1/m + 1/k + 1/n)

    Example:
        >>> harmonic_size(4096.0, 4096.0, 4096.0), round(harmonic_size(1.0, 4096.0, 4096.0), 3)
        (1365.3333333333333, 1.0)
    """
    return 1.0 / (1.0 / rows + 1.0 / inner + 1.0 / columns)


def matmul_efficiency(size: float, half_size: float) -> float:
    """The fraction of the rate of large matrix products that one of this harmonic size reaches.

    Equation: e(s) = s / (s + h), so that seconds = (2 m k n + 2 h (m k + k n + m n)) / rate: what is spent on the surface
              of the product, to pack, to fill pipelines, to write, comes on top of its volume. It is one half at s = h.

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
        bytes_moved: read and written, with nothing reused from an operator before.
        kernels: how often something has to be launched.
    """
    return {
        "matmul_flops": matmul_flops,
        "size": size,
        "vector_flops": vector_flops,
        "bytes": bytes_moved,
        "kernels": kernels,
    }


def compute_seconds(op: Data, rates: Data) -> float:
    """Seconds that an operator would take if memory and launches cost nothing."""
    seconds = op["vector_flops"] / rates["vector_flops_per_second"]
    if op["matmul_flops"] > 0:
        reached = rates["flops_per_second"] * matmul_efficiency(op["size"], rates["matmul_half_size"])
        seconds = seconds + op["matmul_flops"] / reached
    return seconds


def memory_seconds(bytes_moved: float, rates: Data) -> float:
    """Seconds to read and write so many bytes, at the rate of the smallest cache that holds them all, else of the memory.

    A cache that is too small helps nothing: what comes next has always just been replaced.

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
    """Seconds that starting the kernels of an operator takes."""
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
    """One kernel in place of several: it computes the same and moves no more than the least.

    Args:
        operators: what it computes; matrix products in it keep their sizes on average.
        least_bytes: what the whole has to read and write when nothing in between touches memory.
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
    """What the seconds of an operator are mostly spent on: `compute`, `memory` or `launch`."""
    compute = compute_seconds(op, rates)
    memory = memory_seconds(op["bytes"], rates)
    return bound_by(compute, memory, launch_seconds(op, rates), 0.0)


def bound_by(compute: float, memory: float, launch: float, link: float) -> str:
    """The largest of four times by name, the first of equals: `compute`, `memory`, `launch` or `link`.

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
