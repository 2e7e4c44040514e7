"""The conformance checks on flash-linear-attention at bc3b101: what it gets wrong, and the same mended.

    pip install twoaxis "flash-linear-attention[cpu] @ git+https://github.com/fla-org/flash-linear-attention@bc3b101"
    twoaxis check examples/conformance/fla.py --quick --html page.html

Its kernels compute in float32 on a GPU alone; the reference that they are tested with runs anywhere.
"""

from typing import Any

import torch
from fla.ops.attnres import naive_attnres
from torch import Tensor, nn

from twoaxis.testing import ForeignDepth, float64_stays


class AttnRes(ForeignDepth):
    """naive_attnres: scores in half precision under autocast, and in a float64 model all is rounded to float32."""

    starts_as = "up_to_norm"

    def __init__(self, d_model: int, sublayers: int) -> None:
        super().__init__(d_model, sublayers)
        self.queries = nn.Parameter(torch.zeros(sublayers + 1, d_model))
        self.gains = nn.Parameter(torch.ones(sublayers + 1, d_model))

    def enter(self, embeddings: Tensor) -> tuple[Tensor, ...]:
        return (embeddings,)

    def read(self, index: int, state: tuple[Tensor, ...]) -> tuple[Any, None]:
        return naive_attnres(self.queries[index], state, self.gains[index]), None

    def write(self, index: int, state: tuple[Tensor, ...], update: Tensor, carry: None) -> tuple[Tensor, ...]:
        return (*state, update)

    def leave(self, state: tuple[Tensor, ...]) -> Tensor:
        return self.read(len(self.queries) - 1, state)[0]


class AttnResMended(AttnRes):
    """The same, mended: without autocast, and float64 stays."""

    def read(self, index: int, state: tuple[Tensor, ...]) -> tuple[Any, None]:
        with float64_stays(), torch.autocast(state[0].device.type, enabled=False):
            return super().read(index, state)
