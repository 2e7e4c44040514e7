"""The contract loop over sublayers that a fixture defines: our depth mixers and ends around its own branches."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from twoaxis.checkpoints.layouts import DepthPaths
from twoaxis.core.parameters import initialise
from twoaxis.core.position import LayerStack
from twoaxis.depth import DepthConfig, DepthMixer

from ..golden import gradient

Branch = Callable[[int, Tensor], Tensor]
"""What sublayer `index` adds, given what it reads, before any norm."""


class Passed(NamedTuple):
    """One pass: what entered, the states at all boundaries, what each sublayer read and added, and what was left."""

    embeddings: Tensor
    states: list[Any]
    views: list[Tensor]
    updates: list[Tensor]
    left: Tensor


def loop_paths(depth: DepthConfig, stack: LayerStack) -> DepthPaths:
    """Where the mixers of a loop keep their parameters."""
    return DepthPaths(depth, stack, tuple(f"mixers.{index}" for index in range(stack.n_sublayers)))


class DepthLoop(nn.Module):
    """Our depth mixer alone; `mixers.S.*` and `ends.*` are its parameters, at their initial values."""

    def __init__(self, depth: DepthConfig, d_model: int, n_blocks: int, sublayers: int = 2) -> None:
        super().__init__()
        stack = depth.prepare(LayerStack(d_model, 1e-6, (sublayers,) * n_blocks))
        self.paths = loop_paths(depth, stack)
        mixers, ends = depth.build(stack)
        self.mixers, self.ends = nn.ModuleList(mixers), ends
        initialise(self, 0)
        self.double()

    def run(self, embeddings: Tensor, branch: Branch) -> Passed:
        """Runs the loop; keeps the gradient of the embeddings."""
        embeddings.retain_grad()
        state = self.ends.enter(embeddings)[0]  # type: ignore[operator]
        passed = Passed(embeddings, [state], [], [], embeddings)
        for index, mixer in enumerate(cast(Iterable[DepthMixer], self.mixers)):
            view, carry, _ = mixer.read(state)
            assert isinstance(view, Tensor)
            update = branch(index, view)
            state = mixer.write(state, update, view, carry)
            passed.states.append(state)
            passed.views.append(view)
            passed.updates.append(update)
        return passed._replace(left=self.ends.leave(state)[0])  # type: ignore[operator]

    @torch.no_grad()
    def place(self, values: Mapping[str, Sequence[Tensor]], started: Mapping[str, Sequence[Tensor]]) -> None:
        """Sets every parameter to its stored parts in a row, after comparing its start with the stored one, where given."""
        parameters = dict(self.named_parameters())
        assert parameters.keys() == values.keys(), sorted(parameters.keys() ^ values.keys())
        for name, parts in started.items():
            # Our start is in float32 until the model is widened.
            torch.testing.assert_close(parameters[name], _row(parts), rtol=1e-7, atol=0)
        for name, parts in values.items():
            parameters[name].copy_(_row(parts))

    def gradient(self, name: str) -> Tensor:
        """The gradient of one parameter."""
        return gradient(self.get_parameter(name))


def _row(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.flatten() for part in parts])
