"""A fixture in the making: parameters and inputs are drawn, outputs noted, and gradients stored, zeros where there are none."""

import hashlib
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..golden import Golden, gradient


class Draft:
    """Collects what a fixture holds.

    Args:
        name: of the fixture.
        config: its sizes and options, in the words of the authors.
        about: what else its JSON says.
    """

    def __init__(self, name: str, config: Mapping[str, Any], **about: Any) -> None:
        self.name, self.config, self.about = name, dict(config), about
        self.tensors: dict[str, Tensor] = {}
        self._leaves: dict[str, Tensor] = {}
        self._generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))

    def draw(self, *shape: int) -> Tensor:
        """Standard normal numbers."""
        return torch.randn(shape, generator=self._generator, dtype=torch.float64)

    def param(self, name: str, *shape: int, around: float = 0.0, scale: float = 0.5, grad: bool = False) -> Tensor:
        """A parameter, with its gradient where that is asked for."""
        value = (around + scale * self.draw(*shape)).requires_grad_()
        return self.keep(f"param/{name}", value, f"grad/{name}" if grad else None)

    def matrix(self, name: str, rows: int, columns: int, grad: bool = False) -> Tensor:
        """A parameter of a linear map."""
        return self.param(name, rows, columns, scale=columns**-0.5, grad=grad)

    def input(self, name: str, *shape: int, grad: str | None = None) -> Tensor:
        """An input, with its gradient under a name where that is asked for."""
        return self.keep(f"input/{name}", self.draw(*shape).requires_grad_(), grad and f"grad/{grad}")

    def tokens(self, name: str, vocabulary: int, *shape: int) -> Tensor:
        """Token ids."""
        return self.keep(f"input/{name}", torch.randint(vocabulary, shape, generator=self._generator))

    def keep(self, name: str, value: Tensor, grad: str | None = None) -> Tensor:
        """Notes any tensor, and the name of its gradient."""
        self.tensors[name] = value
        if grad is not None:
            self._leaves[grad] = value
        return value

    def watch(self, name: str, value: Tensor) -> Tensor:
        """Notes that the gradient at a tensor which is no leaf belongs to the fixture."""
        value.retain_grad()
        self._leaves[f"grad/{name}"] = value
        return value

    def output(self, name: str, value: Tensor) -> Tensor:
        """Notes an output."""
        return self.keep(f"output/{name}", value)

    def backward(self, output: Tensor, cotangent: str = "cotangent") -> "Draft":
        """Draws what the output is weighed with and notes every gradient."""
        return self.finish((output * self.keep(f"input/{cotangent}", self.draw(*output.shape))).sum())

    def finish(self, loss: Tensor) -> "Draft":
        """Notes every gradient of the loss."""
        loss.backward()
        self.tensors |= {name: gradient(leaf) for name, leaf in self._leaves.items()}
        return self

    def write(self, folder: Path) -> Golden:
        """Writes the fixture, and reads it as any other one."""
        tensors = {name: value.detach().contiguous().clone() for name, value in self.tensors.items()}
        about = {
            "name": self.name,
            "reference": "made from the published equations by tests/parity/made, not by the authors' code",
            "config": self.config,
            "tolerance": "float64: atol 1e-10, rtol 1e-10",
            "tensors": {
                name: {
                    "shape": list(value.shape),
                    "dtype": str(value.dtype).removeprefix("torch."),
                    "sha256_16": hashlib.sha256(value.numpy().tobytes()).hexdigest()[:16],
                }
                for name, value in tensors.items()
            },
            **self.about,
        }
        save_file(tensors, folder / f"{self.name}.safetensors")
        path = folder / f"{self.name}.json"
        path.write_text(json.dumps(about))
        return Golden.read(path)
