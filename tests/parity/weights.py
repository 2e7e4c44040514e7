"""From the authors' parameter names to ours, and back for the gradients."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from twoaxis.checkpoints.layouts import StateMap

from .golden import Golden, gradient


class Weights:
    """Collects our state dict from stored parameters and remembers where each of them went."""

    def __init__(self, golden: Golden) -> None:
        self.golden = golden
        self.state: dict[str, Tensor] = {}
        self._places: dict[str, tuple[str, int, int] | None] = {}

    def put(self, ours: str, *theirs: str) -> None:
        """Our parameter is their parameters stacked along the first axis, in order."""
        parts = [self.golden.take(f"param/{name}") for name in theirs]
        start = 0
        for name, part in zip(theirs, parts, strict=True):
            self._places[name] = (ours, start, start + part.shape[0])
            start += part.shape[0]
        self.state[ours] = torch.cat(parts)

    def follow(self, table: StateMap) -> None:
        """Our parameters are those of a published layout."""
        for entry in table.entries:
            self.put(entry.ours, *(part.name for part in entry.parts))
        for constant in table.constants:
            self.absent(constant.part.name)

    def absent(self, theirs: str) -> None:
        """Their parameter does not exist here; its gradient must be absent or zero."""
        self.golden.take(f"param/{theirs}")
        self._places[theirs] = None

    def load(self, model: nn.Module) -> None:
        """Sets every parameter of our model, each exactly once."""
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        model.double()
        model.load_state_dict({name: value.reshape(shapes[name]) for name, value in self.state.items()})
        self._saves_what_was_loaded(model)

    def saved(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Yields the parameters of our model under the authors' names and in their shapes."""
        for theirs, place in self._places.items():
            if place is not None:
                ours, start, stop = place
                parameter = model.get_parameter(ours).detach()
                whole = parameter.numel() == self.golden.tensors[f"param/{theirs}"].numel()
                part = parameter if whole else parameter[start:stop]
                yield theirs, part.reshape(self.golden.tensors[f"param/{theirs}"].shape)

    def _saves_what_was_loaded(self, model: nn.Module) -> None:
        for theirs, value in self.saved(model):
            assert torch.equal(value, self.golden.tensors[f"param/{theirs}"]), f"{theirs} is saved otherwise than it was loaded"

    def gradients(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Yields the gradient of each stored parameter, under its stored name and shape."""
        for theirs, place in self._places.items():
            shape = self.golden.tensors[f"param/{theirs}"].shape
            if place is None:
                yield f"grad/{theirs}", torch.zeros(shape, dtype=torch.float64)
                continue
            ours, start, stop = place
            found = gradient(model.get_parameter(ours))
            whole = len([other for other in self._places.values() if other and other[0] == ours]) == 1
            yield f"grad/{theirs}", (found if whole else found[start:stop]).reshape(shape)
