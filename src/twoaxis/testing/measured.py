"""Measurements of a run, for comparison with declared numbers."""

from typing import Any

import torch
from torch import Tensor, nn

from twoaxis.core.measure import Operation, Operations, gradients, product_flops, saved_bytes, storage_bytes, tensors
from twoaxis.model.trace import Trace, equal_tokens, read_and_write, sublayer_list, trace

__all__ = [
    "STATISTICS",
    "LowPrecisionStatistics",
    "Trace",
    "equal_tokens",
    "gradients",
    "product_flops",
    "reachable_tensors",
    "read_and_write",
    "saved_bytes",
    "storage_bytes",
    "sublayer_list",
    "tensors",
    "trace",
]

STATISTICS = (
    "softmax",
    "exp",
    "log",
    "sqrt",
    "rsqrt",
    "pow",
    "sigmoid",
    "tanh",
    "sum",
    "mean",
    "var",
    "norm",
    "logsumexp",
    "cumsum",
    "prod",
)
"""Operations whose result feeds a statistic: a normaliser, a gate or a softmax."""


def reachable_tensors(value: Any) -> list[Tensor]:
    """Every tensor that an object holds, through its attributes, tuples, lists and dictionaries."""
    found: list[Tensor] = []
    seen: set[int] = set()
    todo = [value]
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(item, str | int | float | type | nn.Module | None):
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, dict):
            todo.extend(item.values())
        elif isinstance(item, list | tuple | set):
            todo.extend(item)
        else:
            todo.extend(getattr(item, "__dict__", {}).values())
    return found


class LowPrecisionStatistics(Operations):
    """Records every operation of `STATISTICS` that returns half precision."""

    def __init__(self) -> None:
        super().__init__(self._look)
        self.found: list[str] = []

    def _look(self, operation: Operation) -> None:
        words = operation.name.split("_")
        statistic = any(word in STATISTICS for word in words) and "backward" not in words
        if statistic and {t.dtype for t in operation.made} & {torch.bfloat16, torch.float16}:
            self.found.append(operation.name)
