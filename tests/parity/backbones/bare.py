"""The tiny decoder whose branches hold no norm: one with or without a gain stands before each, and after the last."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from twoaxis.depth import DepthConfig

from ..golden import Golden, gradient
from .tinylm import TinyLM


class BareLM(TinyLM):
    """Our depth mixer around the branches of a fixture.

    Args:
        golden: with the branches, and the gains of their norms if any.
        depth: the mixer.
        eps: of every norm.
    """

    def __init__(self, golden: Golden, depth: DepthConfig, eps: float) -> None:
        super().__init__(golden, depth)
        self.eps, self.views = eps, dict[int, Tensor]()
        self.gains = {name: golden.take(name) for name in golden.tensors if name.startswith("param/norms.")}
        for leaf in (*self.gains.values(), *self.body.values()):
            leaf.requires_grad_()

    def computed(self) -> dict[str, Any]:
        """What every fixture may store, and the states as `states`."""
        found = self.run() | {f"output/branch_input_{index}": view for index, view in self.views.items()}
        leaves = self.gains | {f"param/body.{name}": leaf for name, leaf in self.body.items()}
        return found | {name.replace("param/", "grad/", 1): gradient(leaf) for name, leaf in leaves.items()}

    def context(self, index: int, x: Tensor) -> Tensor:
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        gains = [self.gains[name] for name in (f"param/norms.{index}", f"param/norms.{index}.weight") if name in self.gains]
        return normed * gains[0] if gains else normed

    def last(self, x: Tensor) -> Tensor:
        return self.context(len(self.mixers), x)

    def branch(self, index: int, x: Tensor) -> Tensor:
        self.views[index] = x
        return super().branch(index, x)


def streams(states: Sequence[Any], n: int) -> dict[str, Tensor]:
    """The first n tensors of every state, as fixtures store them."""
    names = ["init", *(str(index) for index in range(len(states) - 1))]
    return {f"output/streams_{name}": torch.stack(list(state[:n]), dim=-2) for name, state in zip(names, states, strict=True)}
