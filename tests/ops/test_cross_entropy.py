from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from twoaxis import DataError
from twoaxis.ops import cross_entropy
from twoaxis.ops.cross_entropy import IGNORE, linear_cross_entropy
from twoaxis.ops.precision import Impl

from .compare import LargestTensor, assert_same, assert_within_rounding, normal, output_and_gradients

IMPLS: list[Impl] = ["fused", "reference"]


def loss(targets: Tensor, impl: Impl = "fused"):  # type: ignore[no-untyped-def]
    return lambda hidden, weight: linear_cross_entropy(hidden, weight, targets, impl)


def loop_loss(targets: Tensor):  # type: ignore[no-untyped-def]
    def total(hidden: Tensor, weight: Tensor) -> Tensor:
        result = 0 * hidden.sum() + 0 * weight.sum()
        for h, target in zip(hidden, targets.tolist(), strict=True):
            if target != IGNORE:
                logits = torch.stack([(h * w).sum() for w in weight])
                result = result + torch.log(torch.exp(logits).sum()) - logits[target]
        return result

    return total


@pytest.fixture(params=[3, 1024], ids=lambda rows: f"{rows} rows at once")
def rows_at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "ROWS_AT_ONCE", request.param)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("rows", [1, 3, 1024])
@given(data=st.data(), N=st.integers(1, 7), D=st.integers(1, 3), V=st.integers(1, 4))
@settings(max_examples=12)
def test_equals_loops(impl: Impl, rows: int, data: st.DataObject, N: int, D: int, V: int) -> None:
    targets = torch.tensor(data.draw(st.lists(st.integers(0, V - 1) | st.just(IGNORE), min_size=N, max_size=N)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cross_entropy, "ROWS_AT_ONCE", rows)
        assert_same(loss(targets, impl), loop_loss(targets), (normal(N, D), normal(V, D, seed=1)))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.usefixtures("rows_at_once")
def test_gradients_by_finite_differences(impl: Impl) -> None:
    targets = torch.tensor([0, IGNORE, 4, 2, 2])
    leaves = normal(5, 3).requires_grad_(), normal(5, 3, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(loss(targets, impl), leaves)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("bad", [-1, 4, 2**40])
def test_a_target_outside_the_vocabulary(impl: Impl, bad: int) -> None:
    targets = torch.tensor([0, IGNORE, bad, 3])
    message = f"^target={bad}: must be in 0..3, or -100 for a token without a loss; write -100 where there is none$"
    with pytest.raises(DataError, match=message):
        linear_cross_entropy(normal(4, 2), normal(4, 2, seed=1), targets, impl)


def test_only_the_wanted_gradients() -> None:
    targets = torch.tensor([0, 2])
    hidden, weight = normal(2, 3), normal(4, 3, seed=1)
    (both_hidden, both_weight) = output_and_gradients(loss(targets), (hidden, weight))[1:]
    h = hidden.clone().requires_grad_()
    torch.testing.assert_close(torch.autograd.grad(loss(targets)(h, weight), h)[0], both_hidden)
    w = weight.clone().requires_grad_()
    torch.testing.assert_close(torch.autograd.grad(loss(targets)(hidden, w), w)[0], both_weight)
    assert not loss(targets)(hidden, weight).requires_grad


@pytest.mark.parametrize("impl", IMPLS)
def test_no_valid_target(impl: Impl) -> None:
    # Case A19: a mean over nothing would be NaN.
    targets = torch.full((4,), IGNORE)
    total, *gradients = output_and_gradients(loss(targets, impl), (normal(4, 3), normal(5, 3, seed=1)))
    assert total.item() == 0.0
    assert all(torch.equal(gradient, torch.zeros_like(gradient)) for gradient in gradients)


SPLITS: list[Sequence[int]] = [(6,), (1, 5), (3, 3), (1, 1, 4)]


@pytest.mark.parametrize("masked", [(), (2,), (0,), (0, 1, 2)], ids=lambda masked: f"masked {masked}")
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_accumulation_equals_the_full_batch(split: Sequence[int], masked: Sequence[int]) -> None:
    # Case A18: the mean of means weighs the tokens of small micro-batches too much.
    hidden, weight = normal(6, 4), normal(9, 4, seed=1)
    targets = torch.tensor([3, 1, 4, 1, 5, 8])
    targets[list(masked)] = IGNORE
    count = (targets != IGNORE).sum()

    def accumulated(hidden: Tensor, weight: Tensor) -> Tensor:
        parts = zip(hidden.split(list(split)), targets.split(list(split)), strict=True)
        return torch.stack([linear_cross_entropy(h, weight, t) for h, t in parts]).sum() / count

    def full(hidden: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(hidden @ weight.T, targets, ignore_index=IGNORE)

    assert_same(accumulated, full, (hidden, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding(dtype: torch.dtype) -> None:
    targets = torch.arange(32) % 17
    inputs = [(tensor.to(dtype)) for tensor in (normal(32, 16), normal(17, 16, seed=1))]
    exact = output_and_gradients(loss(targets, "reference"), [tensor.double() for tensor in inputs])
    if dtype == torch.float32:
        assert_within_rounding(loss(targets), loss(targets, "reference"), inputs, dtype)
    total = loss(targets)(*inputs)
    assert total.dtype == torch.float32, "the sum of many losses is never kept in bfloat16"
    torch.testing.assert_close(total.double(), exact[0], rtol=4 * torch.finfo(dtype).eps, atol=0)


def test_autocast() -> None:
    targets = torch.tensor([0, 1, IGNORE, 2])
    inputs = normal(4, 8, dtype=torch.float32), normal(5, 8, seed=1, dtype=torch.float32)
    plain = output_and_gradients(loss(targets), inputs)
    with torch.autocast("cpu", torch.bfloat16):
        cast = output_and_gradients(loss(targets), inputs)
    for a, b in zip(plain, cast, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
    assert not torch.equal(plain[0], cast[0]), "the product is in bfloat16"


def test_logits_exist_only_a_chunk_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "ROWS_AT_ONCE", 8)
    leaves = normal(64, 2).requires_grad_(), normal(40, 2, seed=1).requires_grad_()
    saved: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    with LargestTensor() as seen, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss(torch.arange(64) % 40)(*leaves).backward()
    assert seen.largest == 8 * 40
    assert sum(saved) == 64 * 2 + 40 * 2, "the gradients, no logits"
