"""The operators of any computation, counted while PyTorch runs it one operation at a time."""

from collections.abc import Callable

from torch import Tensor
from torch.utils.flop_counter import flop_registry

from twoaxis.core.measure import Operation, Operations
from twoaxis.ops.kernels import without_kernels
from twoaxis.planner.formulas.roofline import Data, harmonic_size, operator

FUNCTION_FLOPS = 20.0
"""FLOPs of an exponential, a logarithm or another function of one number."""

FUNCTIONS = (
    "exp",
    "log",
    "silu",
    "sigmoid",
    "tanh",
    "gelu",
    "erf",
    "softmax",
    "pow",
    "cos",
    "sin",
    "rsqrt",
    "nll",
    "logsumexp",
)
"""Operations that evaluate such a function for each number."""

KEYS_AT_ONCE = {"cpu": 512, "cuda": 128}
"""Keys per block of the attention kernels of PyTorch, which also compute the masked pairs of a block."""

Run = Callable[[], object]


def eager_operators(run: Run) -> list[Data]:
    """Runs a computation once, without kernels, and returns its operators in order, those of its backward pass included.

    Example:
        >>> import torch
        >>> a = torch.zeros(8, 8)
        >>> [op["matmul_flops"] for op in eager_operators(lambda: (a @ a).exp())]
        [1024.0, 0.0]
    """
    found: list[Data] = []

    def note(operation: Operation) -> None:
        if operation.name.startswith("scaled_dot_product"):
            found.append(_attention(operation))
        elif operation.moves and not operation.name.startswith(("is_", "item", "local_scalar")):
            count = flop_registry.get(operation.function.overloadpacket)
            flops = float(count(*operation.args, **operation.kwargs, out_val=operation.result)) if count else 0.0
            found.append(_operator(operation.name, flops, operation.given, operation.made))

    # Composite operations are counted by their parts.
    with Operations(note, decompose=True), without_kernels():
        run()
    return found


def _operator(name: str, flops: float, given: list[Tensor], made: list[Tensor]) -> Data:
    moved = float(sum(t.numel() * t.element_size() for t in (*given, *made)))
    if flops:
        return operator(flops, _size(given), 0.0, moved, 1.0)
    work = max((t.numel() for t in (*given, *made)), default=0)
    return operator(0.0, 0.0, work * (FUNCTION_FLOPS if any(f in name for f in FUNCTIONS) else 1.0), moved, 1.0)


def _attention(operation: Operation) -> Data:
    """Products of queries with keys and of weights with values, over blocks that are not fully masked, and the softmax."""
    given, made = operation.given, operation.made
    backward = "backward" in operation.name
    q, k, v = given[1:4] if backward else given[:3]
    batch, heads, queries, width = q.shape
    names = [argument.name for argument in operation.function._schema.arguments]
    causal = {**dict(zip(names, operation.args, strict=False)), **operation.kwargs}.get("is_causal", False)
    pairs = _computed_pairs(queries, k.shape[2], KEYS_AT_ONCE.get(q.device.type, 1), causal)
    # Backward, the scores are computed again, and every product has two gradients.
    flops = batch * heads * pairs * (6 * width + 4 * v.shape[-1] if backward else 2 * width + 2 * v.shape[-1])
    moved = float(sum(t.numel() * t.element_size() for t in (*given, *made)))
    size = harmonic_size(queries, width, k.shape[2])
    return operator(float(flops), size, float(batch * heads * pairs * FUNCTION_FLOPS), moved, 1.0)


def _computed_pairs(queries: int, keys: int, at_once: int, causal: bool) -> int:
    """Pairs of a query and a key in all blocks of keys that are not masked for every query of a block as long."""
    if not causal:
        return queries * keys
    blocks = [(begin, min(begin + at_once, queries)) for begin in range(0, queries, at_once)]
    return sum((end - begin) * min(begin + at_once, keys) for begin, end in blocks)


def _size(given: list[Tensor]) -> float:
    """Harmonic size of the product of the first two matrices, or stacks: [.., m, k] by [.., k, n], or queries by keys."""
    a, b = [t for t in given if t.ndim >= 2][:2]
    columns = b.shape[-1] if a.shape[-1] == b.shape[-2] else b.shape[-2]
    return harmonic_size(a.shape[-2], a.shape[-1], columns)
