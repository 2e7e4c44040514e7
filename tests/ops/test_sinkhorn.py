import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from twoaxis.core.errors import ConfigError
from twoaxis.ops.precision import Impl
from twoaxis.ops.sinkhorn import Order, Sinkhorn, Start, sinkhorn

from .compare import assert_same, normal

STARTS: tuple[Start, ...] = ("exp", "exp_minus_max", "softmax", "log")
ORDERS: tuple[Order, ...] = ("sources_first", "destinations_first")
ENGINES: tuple[Impl, ...] = ("fused", "reference")
OPTIONS = [
    Sinkhorn(rounds, order, start, eps, 2 * eps)
    for rounds, order, start, eps in itertools.product((1, 2, 5), ORDERS, STARTS, (0.0, 1e-2))
    if not (start == "log" and eps)
]
SHARP = pytest.mark.parametrize("options", OPTIONS, ids=str)


def loops(logits: Tensor, options: Sinkhorn) -> Tensor:
    """One matrix at a time, as it is written."""
    n, results = logits.shape[0], []
    for logit in logits.reshape(n, n, -1).unbind(-1):
        first = 1 if options.order == "destinations_first" else 0
        matrix = logit.exp()
        if options.start == "exp_minus_max":
            matrix = (logit - logit.max(first, keepdim=True).values).exp()
        if options.start == "softmax":
            matrix = matrix / matrix.sum(first, keepdim=True)
        matrix = matrix + options.start_eps
        for step in range(options.start == "softmax", 2 * options.rounds):
            axis = first if step % 2 == 0 else 1 - first
            matrix = matrix / (matrix.sum(axis, keepdim=True) + options.sum_eps)
        results.append(matrix)
    return torch.stack(results, -1).view_as(logits)


@SHARP
def test_equals_loops(options: Sinkhorn) -> None:
    def normalise(impl: Impl) -> Callable[[Tensor], Tensor]:
        return lambda logits: sinkhorn(logits, options, impl)

    for impl in ENGINES:
        assert_same(normalise(impl), lambda logits: loops(logits, options), [normal(3, 3, 2, 2)])


@SHARP
def test_gradcheck(options: Sinkhorn) -> None:
    logits = normal(3, 3, 2, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: sinkhorn(x, options), logits, atol=1e-7)


@given(n=st.integers(1, 5), tokens=st.integers(1, 4), seed=st.integers(0, 99), order=st.sampled_from(ORDERS))
@settings(max_examples=30)
def test_sums_are_one(n: int, tokens: int, seed: int, order: Order) -> None:
    matrix = sinkhorn(normal(n, n, tokens, seed=seed), Sinkhorn(order=order, rounds=60))
    ones = torch.ones(n, tokens, dtype=matrix.dtype)
    last = 0 if order == "destinations_first" else 1
    torch.testing.assert_close(matrix.sum(last), ones, rtol=0, atol=1e-14)
    torch.testing.assert_close(matrix.sum(1 - last), ones, rtol=0, atol=1e-5)


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_matrices_are_doubly_stochastic_in_half_precision(start: Start, dtype: torch.dtype, autocast: bool) -> None:
    logits = (0.5 * normal(4, 4, 4096)).to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        matrix = sinkhorn(logits, Sinkhorn(start=start))
    assert matrix.dtype == torch.float32
    for axis in (0, 1):
        assert (matrix.sum(axis) - 1).square().mean().sqrt() < 1e-5


@pytest.mark.parametrize("impl", ENGINES)
@pytest.mark.parametrize("start", ["exp_minus_max", "log"])
def test_large_logits_do_not_overflow(start: Start, impl: Impl) -> None:
    logits = (200 * torch.eye(3)).unsqueeze(-1).requires_grad_()
    matrix = sinkhorn(logits, Sinkhorn(start=start), impl)
    torch.testing.assert_close(matrix.detach(), torch.eye(3).unsqueeze(-1))
    (gradient,) = torch.autograd.grad(matrix[0, 1].sum(), logits)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("start", STARTS)
def test_saves_the_logits_alone(start: Start) -> None:
    logits, kept = normal(4, 4, 8).requires_grad_(), []
    with saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        sinkhorn(logits, Sinkhorn(start=start))
    assert [tensor.data_ptr() for tensor in kept] == [logits.data_ptr()]


def test_a_gradient_with_the_tokens_first() -> None:
    logits = normal(3, 3, 2, 2).requires_grad_()
    cotangent = normal(2, 2, 3, 3, seed=1).permute(2, 3, 0, 1)
    matrix = sinkhorn(logits, Sinkhorn(rounds=2))
    (got,) = torch.autograd.grad(matrix, logits, cotangent, retain_graph=True)
    (expected,) = torch.autograd.grad(matrix, logits, cotangent.contiguous())
    assert torch.equal(got, expected)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rounds": 0}, "rounds=0: must be >= 1; use 20"),
        ({"sum_eps": -1.0}, "sum_eps=-1.0: must be >= 0"),
        ({"start": "log", "start_eps": 1e-6}, "start_eps=1e-06: must be 0 with start='log'"),
    ],
)
def test_options_that_cannot_be(options: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Sinkhorn(**options)  # type: ignore[arg-type]
