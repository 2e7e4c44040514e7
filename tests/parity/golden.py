"""Golden tensors: reading a fixture, checking that it is whole, and comparing with it.

A fixture is `NAME.safetensors` beside `NAME.json`. The JSON has a `name`, a `tolerance` in words, and `tensors`: the
tensor names, or a table with the shape, dtype and first 16 hex digits of the SHA-256 of each. Tensor names begin with
`param/`, `input/`, `output/` or `grad/`.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor


class MalformedFixture(Exception):
    """A fixture that cannot be compared with."""


@dataclass(frozen=True)
class Tolerance:
    """How far our outputs and gradients may be from the stored ones, in their precision.

    `gradient_of_largest`, where there is one, is the only bound on gradients, relative to the largest entry of each.
    """

    output: float
    gradient_rtol: float
    gradient_of_largest: float | None = None

    @staticmethod
    def parse(text: str) -> "Tolerance":
        """Reads words such as `float64: atol/rtol 1e-9 (grads 1e-8); float32: ...`.

        Float32 alone needs a number for gradients too: `float32: atol 2e-4, rtol 2e-4; 1e-3 relative to max|grad| on ...`.
        """
        if single := re.match(r"float32: atol (\de-\d+), rtol \1\b.*?(\de-\d+) relative to max\|grad\|", text):
            return Tolerance(float(single[1]), 0.0, float(single[2]))
        part = text.partition("float32")[0]
        numbers = [float(number) for number in re.findall(r"\b1e-\d+", part)]
        if "float64" not in part or not numbers:
            raise MalformedFixture(f"tolerance={text!r}: must begin with a number for float64")
        gradient = re.search(r"(1e-\d+) on grads|grads (1e-\d+)", part)
        return Tolerance(numbers[0], float(gradient[1] or gradient[2]) if gradient else numbers[0])


@dataclass(frozen=True)
class Golden:
    """One fixture; `take` records what has been used, so that nothing stored is forgotten."""

    name: str
    about: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    taken: set[str] = field(default_factory=set)

    @staticmethod
    def read(path: Path) -> "Golden":
        """Reads and checks a fixture, given the path of its JSON.

        Raises:
            MalformedFixture: a file that is missing or damaged, or tensors that are not what the JSON says.
        """
        try:
            about = json.loads(path.read_text())
            tensors = load_file(path.with_suffix(".safetensors"))
        except (OSError, ValueError, SafetensorError) as error:
            raise MalformedFixture(f"{path.name}: {error}") from error
        if not isinstance(about, dict) or not isinstance(about.get("name"), str):
            raise MalformedFixture(f"{path.name}: must be a table with a name")
        declared = about.get("tensors")
        if not isinstance(declared, list | dict) or set(declared) != set(tensors):
            difference = sorted(set(tensors) ^ set(declared or ()))
            raise MalformedFixture(f"{path.name}: tensors differ from the stored ones: {difference}")
        if isinstance(declared, dict):
            for name, tensor in tensors.items():
                _check(path, name, tensor, declared[name])
        return Golden(about["name"], about, tensors)

    def take(self, name: str) -> Tensor:
        """Returns a copy of a stored tensor."""
        self.taken.add(name)
        return self.tensors[name].clone()

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def compare(self, computed: Mapping[str, Tensor]) -> None:
        """Compares every stored output and gradient, and checks that every stored input and parameter was used.

        Raises:
            AssertionError: a difference, or a stored tensor that was not computed or not used.
        """
        stored = {name for name in self.tensors if name.startswith(("output/", "grad/"))}
        assert not stored - set(computed), f"{self.name}: not computed: {sorted(stored - set(computed))}"
        unused = set(self.tensors) - stored - self.taken
        assert not unused, f"{self.name}: not used: {sorted(unused)}"
        tolerance = Tolerance.parse(self.about.get("tolerance", ""))
        for name in sorted(stored, reverse=True):
            rtol = tolerance.output if name.startswith("output/") else tolerance.gradient_rtol
            atol = tolerance.output
            if name.startswith("grad/") and tolerance.gradient_of_largest is not None:
                atol = tolerance.gradient_of_largest * float(self.tensors[name].abs().max())
            torch.testing.assert_close(
                computed[name].detach(),
                self.tensors[name],
                rtol=rtol,
                atol=atol,
                msg=lambda text, name=name: f"{self.name}: {name}: {text}",
            )


def gradient(leaf: Tensor) -> Tensor:
    """What the backward pass has left at a leaf: zeros where nothing depends on it."""
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def _check(path: Path, name: str, tensor: Tensor, declared: Mapping[str, Any]) -> None:
    found = {
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "sha256_16": hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()[:16],
    }
    for key, value in found.items():
        if key in declared and declared[key] != value:
            raise MalformedFixture(f"{path.name}: {name} has {key} {value}, not {declared[key]}")


def fixture_paths(folder: Path) -> list[Path]:
    """The JSON path of every fixture in a folder, also of one whose JSON or tensors are missing."""
    stems = {path.with_suffix(".json") for path in folder.iterdir() if path.suffix in (".json", ".safetensors")}
    return sorted(stems)
