"""What the operator tests share: seeded tensors, outputs with all gradients, and rounding budgets."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normal numbers that depend on the seed and shape only."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def output_and_gradients(function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """The output and the gradient of each input, for a fixed cotangent."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    output = function(*leaves)
    cotangent = normal(*output.shape, seed=99, dtype=output.dtype) if output.ndim else torch.ones_like(output)
    gradients = torch.autograd.grad(output, leaves, cotangent)
    assert output.dtype == inputs[0].dtype
    assert all(gradient.dtype == tensor.dtype for gradient, tensor in zip(gradients, inputs, strict=True))
    return [output.detach(), *gradients]


def assert_same(function: Callable[..., Tensor], other: Callable[..., Tensor], inputs: Sequence[Tensor]) -> None:
    """Both functions have the same output and gradients in float64."""
    results = zip(output_and_gradients(function, inputs), output_and_gradients(other, inputs), strict=True)
    for ours, theirs in results:
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11)


def assert_within_rounding(
    fused: Callable[..., Tensor],
    reference: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    dtype: torch.dtype,
    factor: float = 2,
) -> None:
    """The fused engine errs at most `factor` times as much as the reference in the same dtype plus one rounding."""
    rounded = [tensor.to(dtype) for tensor in inputs]
    exact = output_and_gradients(reference, [tensor.double() for tensor in rounded])
    errors = zip(output_and_gradients(fused, rounded), output_and_gradients(reference, rounded), exact, strict=True)
    for ours, theirs, truth in errors:
        size = truth.abs().max()
        budget = factor * ((theirs.double() - truth).abs().max() + torch.finfo(dtype).eps * size)
        assert (ours.double() - truth).abs().max() <= budget


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation returns."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.largest = max(self.largest, leaf.numel())
        return result
