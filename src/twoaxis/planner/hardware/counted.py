"""The operators of any computation, counted while PyTorch runs it one operation at a time."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from twoaxis.core.measure import NOTHING_MOVED, tensors
from twoaxis.planner.formulas.roofline import Data, harmonic_size, operator

FUNCTION_FLOPS = 20.0
"""Operations that an exponential, a logarithm or another function of one number takes."""

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
"""Keys that the attention kernels of PyTorch take together; what a causal mask hides of them is computed for nothing."""

Run = Callable[[], object]


def eager_operators(run: Run) -> list[Data]:
    """Runs a computation once and returns its operators in order, those of its backward pass included.

    Example:
        >>> import torch
        >>> a = torch.zeros(8, 8)
        >>> [op["matmul_flops"] for op in eager_operators(lambda: (a @ a).exp())]
        [1024.0, 0.0]
    """
    with _Recorder() as recorder:
        run()
    return recorder.operators


class _Recorder(TorchDispatchMode):
    """Notes every operation that computes or moves something."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Data] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operation and looks at its tensors."""
        kwargs = kwargs or {}
        # What consists of other operations costs what they cost; inference mode would hide them.
        with self:
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__.strip("_")
        if name.startswith("scaled_dot_product"):
            self.operators.append(_attention(func, args, kwargs, tensors(result)))
        elif not name.startswith((*NOTHING_MOVED, "is_", "item", "local_scalar")):
            count = flop_registry.get(func.overloadpacket)
            flops = float(count(*args, **kwargs, out_val=result)) if count else 0.0
            self.operators.append(_operator(name, flops, tensors((args, kwargs)), tensors(result)))
        return result


def _operator(name: str, flops: float, given: list[Tensor], made: list[Tensor]) -> Data:
    moved = float(sum(t.numel() * t.element_size() for t in (*given, *made)))
    if flops:
        return operator(flops, _size(given), 0.0, moved, 1.0)
    work = max((t.numel() for t in (*given, *made)), default=0)
    return operator(0.0, 0.0, work * (FUNCTION_FLOPS if any(f in name for f in FUNCTIONS) else 1.0), moved, 1.0)


def _attention(func: Any, args: Any, kwargs: Any, made: list[Tensor]) -> Data:
    """Products of queries with keys and of weights with values, over the blocks that are not all hidden, and the softmax."""
    given = tensors((args, kwargs))
    backward = "backward" in func.overloadpacket.__name__
    q, k, v = given[1:4] if backward else given[:3]
    batch, heads, queries, width = q.shape
    names = [argument.name for argument in func._schema.arguments]
    causal = {**dict(zip(names, args, strict=False)), **kwargs}.get("is_causal", False)
    pairs = _computed_pairs(queries, k.shape[2], KEYS_AT_ONCE.get(q.device.type, 1), causal)
    # Backward, the scores are computed again, and every product has two gradients.
    flops = batch * heads * pairs * (6 * width + 4 * v.shape[-1] if backward else 2 * width + 2 * v.shape[-1])
    moved = float(sum(t.numel() * t.element_size() for t in (*given, *made)))
    size = harmonic_size(queries, width, k.shape[2])
    return operator(float(flops), size, float(batch * heads * pairs * FUNCTION_FLOPS), moved, 1.0)


def _computed_pairs(queries: int, keys: int, at_once: int, causal: bool) -> int:
    """Pairs of a query and a key in all blocks of keys that are not hidden from every query of a block as long."""
    if not causal:
        return queries * keys
    blocks = [(begin, min(begin + at_once, queries)) for begin in range(0, queries, at_once)]
    return sum((end - begin) * min(begin + at_once, keys) for begin, end in blocks)


def _size(given: list[Tensor]) -> float:
    """Of the first two matrices, or stacks of them, that are multiplied: [.., m, k] by [.., k, n], or queries by keys."""
    a, b = [t for t in given if t.ndim >= 2][:2]
    columns = b.shape[-1] if a.shape[-1] == b.shape[-2] else b.shape[-2]
    return harmonic_size(a.shape[-2], a.shape[-1], columns)
