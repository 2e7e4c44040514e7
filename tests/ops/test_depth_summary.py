"""Keys of the own token along depth in the softmax of attention: summed up as one key, they count as each by itself.

Letters: B batch, H heads, G kv-heads, T queries, S keys, K key width, M slots of a token.
"""

import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from twoaxis.core.errors import ConfigError
from twoaxis.ops.depth_attention import depth_summary
from twoaxis.ops.local_attention import local_attention, visible
from twoaxis.ops.precision import Impl

from .compare import LargestTensor, assert_same, assert_within_rounding, normal, output_and_gradients

IMPLS: list[Impl] = ["fused", "reference"]
B, T, K, M = 2, 7, 4, 3


def joint(impl: Impl, weighted: bool = False, **options: Any) -> Any:
    """Attention to tokens and slots in our two steps."""

    def attend(q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> Tensor:
        weight, sink, slots = _parts(more, weighted, options)
        keys, values = slots[: len(slots) // 2], slots[len(slots) // 2 :]
        score, value = depth_summary(q.transpose(1, 2), keys, values)
        beside = (score.transpose(1, 2), value.transpose(1, 2), *weight)
        return local_attention(q, k, v, **{**options, "sink": sink}, beside=beside, impl=impl)

    return attend


def one_softmax(weighted: bool = False, **options: Any) -> Any:
    """One softmax over a matrix of all tokens, all slots and the sink."""

    def attend(q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> Tensor:
        weight, sink, slots = _parts(more, weighted, options)
        groups, wide = q.shape[1] // k.shape[1], torch.float64 if q.dtype == torch.float64 else torch.float32
        spread = [x.transpose(1, 2).repeat_interleave(groups, 1).to(wide) for x in slots]
        keys, values = torch.stack(spread[: len(spread) // 2], 3), torch.stack(spread[len(spread) // 2 :], 3)
        q, k, v = q.to(wide), *(x.repeat_interleave(groups, 1).to(wide) for x in (k, v))
        mask = visible(q.shape[2], k.shape[2], options["window"], options["documents"], options["key_documents"])
        tokens = (q @ k.transpose(-1, -2)).masked_fill(~mask, -torch.inf)
        depth = (q.unsqueeze(3) * keys).sum(-1)
        columns = (
            [tokens, depth] if sink is None else [tokens, depth, sink.view(1, -1, 1, 1).expand(*depth.shape[:3], 1) * K**0.5]
        )
        p = torch.softmax(torch.cat(columns, -1) / K**0.5, dim=-1)
        S, n = k.shape[2], depth.shape[-1]
        y = p[..., :S] @ v + (p[..., S : S + n].unsqueeze(-1) * values).sum(3)
        if weight:
            alone = torch.softmax(torch.cat([columns[0], *columns[2:]], -1) / K**0.5, dim=-1)[..., :S] @ v
            y = alone + weight[0] * (y - alone)
        return y.to(slots[0].dtype)

    return attend


def _parts(more: tuple[Tensor, ...], weighted: bool, options: dict[str, Any]) -> Any:
    """The weight, the sink and the slots among the inputs."""
    count = int(weighted)
    weight, more = more[:count], more[count:]
    return (weight, more[0], more[1:]) if options["sink"] else (weight, None, more)


def inputs(
    groups: int = 2, past: int = 0, weighted: bool = False, sink: bool = False, slots: int = M, B: int = B, T: int = T
) -> list[Tensor]:
    H = 2 * groups
    found = [normal(B, H, T, K), normal(B, 2, T + past, K, seed=1), normal(B, 2, T + past, K, seed=2)]
    found += [torch.tensor([0.4], dtype=torch.float64)] if weighted else []
    found += [normal(H, seed=3)] if sink else []
    return found + [normal(B, T, 2, K, seed=10 + m) for m in range(2 * slots)]


DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 3, 3, 3], [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1]])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("window", "packed", "sink", "weighted"), list(product((None, 3), *[(False, True)] * 3)))
def test_equals_one_softmax(impl: Impl, window: int | None, packed: bool, sink: bool, weighted: bool) -> None:
    for groups, past in ((1, 0), (2, 4)):
        documents = DOCUMENTS[:, : T + past] if packed else None
        options = {
            "window": window,
            "documents": None if documents is None else documents[:, past:],
            "key_documents": documents,
            "sink": sink,
        }
        tensors = inputs(groups, past, weighted, sink)
        assert_same(joint(impl, weighted, **options), one_softmax(weighted, **options), tensors)


PLAIN: dict[str, Any] = {"window": None, "documents": None, "key_documents": None, "sink": False}


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("window", "weighted"), [(None, False), (2, False), (None, True)])
def test_gradients_by_finite_differences(impl: Impl, window: int | None, weighted: bool) -> None:
    # One row of few tokens: each number of them costs two passes. `test_equals_one_softmax` has the gradients of more.
    tensors = [x.requires_grad_() for x in inputs(weighted=weighted, slots=2, B=1, T=4)]
    assert torch.autograd.gradcheck(joint(impl, weighted, **{**PLAIN, "window": window}), tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weighted", [False, True])
def test_rounding(dtype: torch.dtype, weighted: bool) -> None:
    tensors = inputs(weighted=weighted)
    assert_within_rounding(joint("fused", weighted, **PLAIN), joint("reference", weighted, **PLAIN), tensors, dtype, factor=3)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_query_that_sees_no_token_attends_to_its_slots_alone(impl: Impl, window: int | None, weighted: bool) -> None:
    options = {**PLAIN, "window": window, "documents": torch.full((B, T), 7), "key_documents": torch.zeros(B, T).long()}
    q, k, v, *more = inputs(weighted=weighted)
    y, _, grad_k, grad_v, *others = output_and_gradients(joint(impl, weighted, **options), [q, k, v, *more])
    slots = more[weighted:]
    _, value = depth_summary(q.transpose(1, 2), slots[:M], slots[M:])
    torch.testing.assert_close(y, (more[0] if weighted else 1) * value.transpose(1, 2), rtol=1e-12, atol=1e-12)
    assert not grad_k.any() and not grad_v.any()
    assert all(gradient.isfinite().all() and gradient.any() for gradient in others)


@pytest.mark.parametrize("window", [None, 3])
def test_slots_with_a_score_of_minus_infinity_leave_attention_as_it_is(window: int | None) -> None:
    q, k, v, *slots = inputs()
    closed = (torch.full(q.shape[:3], -torch.inf, dtype=q.dtype), slots[0].transpose(1, 2).repeat(1, 2, 1, 1))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    results = []
    for beside in ((), closed):
        y = local_attention(*leaves, window=window, beside=beside)
        results.append((y, *torch.autograd.grad(y.square().sum(), leaves)))
    assert torch.equal(results[0][0], results[1][0])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


def test_a_weight_of_zero_is_attention_to_tokens_and_of_one_the_joint_softmax() -> None:
    q, k, v, *slots = inputs()
    alone, together = local_attention(q, k, v), joint("fused", **PLAIN)(q, k, v, *slots)
    for weight, expected in ((0.0, alone), (1.0, together)):
        y = joint("fused", True, **PLAIN)(q, k, v, torch.tensor([weight], dtype=q.dtype), *slots)
        torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-13)


def test_no_matrix_over_all_pairs() -> None:
    n = 512
    q, k, v = (normal(1, 2, n, K, seed=seed).requires_grad_() for seed in range(3))
    slots = [normal(1, n, 2, K, seed=seed).requires_grad_() for seed in range(4)]
    with LargestTensor() as mode:
        joint("fused", **PLAIN)(q, k, v, *slots).sum().backward()
    assert mode.largest < n * n


def test_large_scores_neither_overflow_nor_vanish() -> None:
    q, k, v, *slots = inputs()
    for factor in (0.0, 1e3):
        y, *gradients = output_and_gradients(joint("fused", **PLAIN), [factor * q, k, v, *slots])
        expected = one_softmax(**PLAIN)(factor * q, k, v, *slots)
        torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-9)
        assert all(gradient.isfinite().all() for gradient in gradients)


def test_without_sources_it_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^depth_summary: got 0 keys and 0 values; give one of each per source$"):
        depth_summary(torch.ones(1, 1, 1, 2), [], [])


def test_the_score_is_the_logarithm_of_the_sum() -> None:
    one = torch.ones(1, 1, 1, 4)
    score, _ = depth_summary(one, [one] * 3, [one] * 3)
    assert math.isclose(score.item(), 2 + math.log(3), rel_tol=1e-6)
