"""Reproducible noise to test modules with, and the distance between tensors."""

import hashlib
from typing import Any

import torch
from torch import Tensor


def noise(shape: tuple[int, ...], name: str) -> Tensor:
    """Standard normal float64 numbers that depend on the shape and the name only."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@torch.no_grad()
def perturb(model: Any, seed: int = 0) -> Any:
    """Adds noise to every parameter, by its name: with scale 0.5, over sqrt(fan in) for matrices."""
    for name, parameter in model.named_parameters():
        scale = 0.5 if parameter.ndim < 2 or "embedding" in name else 0.5 / parameter.shape[-1] ** 0.5
        parameter.add_(noise(tuple(parameter.shape), f"perturb/{seed}/{name}").to(parameter.dtype), alpha=scale)
    return model


def distance(a: Tensor, b: Tensor) -> float:
    """The largest absolute difference between entries; NaN counts as infinite."""
    if not a.numel():
        return 0.0
    return float(torch.nan_to_num((a.detach().double() - b.detach().double()).abs(), nan=torch.inf).max())
