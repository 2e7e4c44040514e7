import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from twoaxis.core.errors import ConfigError
from twoaxis.core.measure import saved_bytes
from twoaxis.ops import reflected_attention as module
from twoaxis.ops.gated_delta import gated_delta
from twoaxis.ops.precision import Impl
from twoaxis.ops.reflected_attention import PathPast, path_attention

from .compare import assert_same, assert_within_rounding, normal, output_and_gradients

IMPLS: list[Impl] = ["fused", "reference"]
BLOCK = module.LARGEST_BLOCK


def inputs(B: int, H: int, G: int, T: int, K: int, V: int, forget: bool) -> list[Tensor]:
    """Queries, keys, values, directions of length 1, strengths up to 2, and forget gates."""
    w, beta = F.normalize(normal(B, G, T, K, seed=3), dim=-1), 2 * torch.sigmoid(2 * normal(B, G, T, seed=4))
    found = [normal(B, H, T, K), normal(B, G, T, K, seed=1), normal(B, G, T, V, seed=2), w, beta]
    return [*found, F.logsigmoid(normal(B, H, T, seed=5))] if forget else found


def part(tensors: list[Tensor], start: int, stop: int) -> list[Tensor]:
    return [x[:, :, start:stop] for x in tensors]


def called(tensors: Any, **options: Any) -> tuple[Tensor, PathPast | None]:
    return path_attention(*tensors[:5], forget_log=tensors[5] if len(tensors) > 5 else None, **options)


def equation(documents: list[list[int]] | None = None) -> Callable[..., Tensor]:
    """The definition with explicit matrices, query by query and key by key."""

    def run(q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor, forget_log: Tensor | None = None) -> Tensor:
        (B, H, T, K), G = q.shape, k.shape[1]
        y = []
        for b in range(B):
            for h in range(H):
                g = h // (H // G)
                A = [torch.eye(K, dtype=q.dtype) - beta[b, g, s] * torch.outer(w[b, g, s], w[b, g, s]) for s in range(T)]
                for t in range(T):
                    terms, product, forgotten, seen = [], torch.eye(K, dtype=q.dtype), 0 * q.sum(), []
                    for j in range(t, -1, -1):
                        if documents and documents[b][j] != documents[b][t]:
                            break
                        terms.append(torch.exp((q[b, h, t] @ product @ k[b, g, j] + forgotten) / math.sqrt(K)))
                        seen.append(v[b, g, j])
                        product = product @ A[j]
                        forgotten = forgotten if forget_log is None else forgotten + forget_log[b, h, j]
                    y.append(sum(a * x for a, x in zip(terms, seen, strict=True)) / sum(terms))
        # The first token meets no reflection and no gate: a sum of zeros makes its gradients zero instead of absent.
        nothing = 0 * sum(x.sum() for x in (w, beta, *([] if forget_log is None else [forget_log])))
        return torch.stack(y).reshape(B, H, T, v.shape[-1]) + nothing

    return run


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("block", [1, 3, BLOCK])
@given(
    G=st.integers(1, 2),
    group=st.integers(1, 2),
    T=st.integers(1, 8),
    K=st.integers(1, 4),
    V=st.integers(1, 3),
    forget=st.booleans(),
    apart=st.booleans(),
)
@settings(max_examples=12)
def test_equals_the_equation(
    impl: Impl, block: int, G: int, group: int, T: int, K: int, V: int, forget: bool, apart: bool
) -> None:
    rows = [[0, 0, 0, 1, 1, 0, 0, 2][:T], [1, 2, 2, 2, 2, 2, 1, 1][:T]] if apart else None
    documents = None if rows is None else torch.tensor(rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "LARGEST_BLOCK", block)
        assert_same(
            lambda *x: called(x, documents=documents, impl=impl)[0], equation(rows), inputs(2, G * group, G, T, K, V, forget)
        )


@pytest.mark.parametrize("T", [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 150])
@pytest.mark.parametrize("past", [0, 3, BLOCK + 6])
@pytest.mark.parametrize("forget", [False, True])
def test_engines_agree_around_the_block_length(T: int, past: int, forget: bool) -> None:
    tensors = inputs(2, 4, 2, past + T, 5, 3, forget)
    documents = (torch.arange(past + T) // 50)[None].expand(2, -1)
    _, before = called(part(tensors, 0, past or 1), past=no_past(tensors), impl="reference")
    before = before if past else no_past(tensors)
    assert before is not None

    def run(impl: Impl) -> Callable[..., Tensor]:
        def flat(*x: Tensor) -> Tensor:
            y, after = called(x, past=before, documents=documents, impl=impl)
            assert after is not None
            return torch.cat([one.flatten() for one in (y, *after) if one is not None])

        return flat

    assert_same(run("fused"), run("reference"), part(tensors, past, past + T))


def no_past(tensors: list[Tensor]) -> PathPast:
    return PathPast(tensors[1][:, :, :0], tensors[2][:, :, :0], tensors[5][..., :0] if len(tensors) > 5 else None)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("forget", [False, True])
@pytest.mark.parametrize("chunks", [(1,) * 9, (4, 1, 3, 1), (9,)])
def test_any_chunks_are_one_pass_and_keys_are_reflected_by_all_later_tokens(
    impl: Impl, forget: bool, chunks: tuple[int, ...]
) -> None:
    tensors = inputs(2, 2, 1, 9, 4, 3, forget)
    past, outputs, start = no_past(tensors), [], 0
    for length in chunks:
        held = [None if one is None else one.clone() for one in past]
        y, after = called(part(tensors, start, start + length), past=past, impl=impl)
        assert after is not None and all(a is b or torch.equal(a, b) for a, b in zip(past, held, strict=True))  # type: ignore[arg-type]
        outputs.append(y)
        past, start = after, start + length
    torch.testing.assert_close(torch.cat(outputs, dim=2), called(tensors)[0], rtol=0, atol=1e-14)
    _, keys, _, w, beta, *gates = tensors
    for s in range(9):
        moved = keys - beta[:, :, s, None, None] * (keys @ w[:, :, s, :, None]) * w[:, :, s, None, :]
        keys = torch.where(torch.arange(9)[:, None] < s, moved, keys)
    torch.testing.assert_close(past.keys, keys, rtol=0, atol=1e-14)
    assert torch.equal(past.values, tensors[2])
    if gates:
        later = gates[0].flip(-1).cumsum(-1).flip(-1) - gates[0]
        torch.testing.assert_close(past.forgotten, later, rtol=0, atol=1e-14)


@pytest.mark.parametrize("impl", IMPLS)
def test_the_forget_gate_is_divided_by_the_scale_too(impl: Impl) -> None:
    q, k, v, w, beta, forget_log = inputs(1, 1, 1, 2, 9, 2, forget=True)
    k = torch.zeros_like(k)
    y, _ = path_attention(q, k, v, w, beta, forget_log=forget_log, impl=impl)
    first = torch.exp(forget_log[..., 1:] / 3)
    expected = (first.unsqueeze(-1) * v[:, :, :1] + v[:, :, 1:]) / (1 + first.unsqueeze(-1))
    torch.testing.assert_close(y[:, :, 1:], expected)


def test_a_strength_of_two_keeps_the_length_of_keys_and_of_one_removes_a_direction() -> None:
    _, k, v, w, beta = inputs(1, 1, 1, 5, 4, 2, forget=False)
    for strength in (1.0, 2.0):
        _, past = path_attention(k, k, v, w, torch.full_like(beta, strength), past=no_past([k, k, v]))
        assert past is not None
        if strength == 2.0:
            torch.testing.assert_close(past.keys.norm(dim=-1), k.norm(dim=-1))
        else:
            assert (past.keys[:, :, :-1] @ w[:, :, -1, :, None]).abs().max() < 1e-15


def test_the_state_of_a_delta_rule_is_made_of_reflected_keys() -> None:
    """Without softmax, with the keys as directions: S_t = sum_j beta_j v_j (A_t ... A_(j+1) k_j)^T, from a state of zero."""
    q, k, v, _, beta = inputs(2, 2, 2, 100, 5, 3, forget=False)
    k = F.normalize(k, dim=-1)
    _, past = path_attention(q, k, v, k, beta, past=no_past([q, k, v]))
    assert past is not None
    reads, state = gated_delta(q, k, v, torch.zeros_like(beta), beta)
    scaled = beta.unsqueeze(-1) * past.values
    torch.testing.assert_close(scaled.transpose(-1, -2) @ past.keys, state, rtol=0, atol=1e-13)
    logits = q[:, :, -1:] @ past.keys.transpose(-1, -2)
    torch.testing.assert_close(logits @ scaled, reads[:, :, -1:], rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding(dtype: torch.dtype) -> None:
    assert_within_rounding(
        lambda *x: called(x)[0], lambda *x: called(x, impl="reference")[0], inputs(1, 2, 1, 100, 8, 8, forget=True), dtype
    )


def test_keys_stay_precise_in_half_precision() -> None:
    tensors = inputs(1, 2, 1, 200, 8, 8, forget=True)
    half = [x.bfloat16() for x in tensors]
    _, past = called(half, past=no_past(half))
    assert past is not None and past.forgotten is not None
    assert past.keys.dtype == past.forgotten.dtype == torch.float32 and past.values.dtype == torch.bfloat16
    _, exact = called([x.double() for x in half], past=no_past(tensors))
    assert exact is not None
    assert (past.keys.double() - exact.keys).abs().max() < 1e-5


def test_only_inputs_are_saved() -> None:
    sizes = []
    for T in (100, 200):
        tensors = [x.requires_grad_() for x in inputs(1, 2, 1, T, 8, 8, forget=True)]
        sizes.append(saved_bytes(lambda: called(tensors)[0], lambda y: [y]))  # noqa: B023
        assert sizes[-1] == sum(x.numel() * 8 for x in tensors)
    assert sizes[1] == 2 * sizes[0]


def test_gradients_of_some_inputs_only() -> None:
    tensors = inputs(1, 2, 1, 9, 4, 3, forget=False)
    expected = output_and_gradients(lambda *x: called(x)[0], tensors)
    for index in range(5):
        leaves = [x.requires_grad_(at == index) for at, x in enumerate(part(tensors, 0, 9))]
        y, _ = called(leaves)
        (gradient,) = torch.autograd.grad(y, leaves[index], normal(*y.shape, seed=99))
        torch.testing.assert_close(gradient, expected[index + 1])


def test_documents_of_other_tokens_are_refused() -> None:
    tensors = inputs(1, 1, 1, 3, 2, 2, forget=False)
    with pytest.raises(ConfigError, match=r"^path_attention: got documents of 4 tokens for 3; give those of the earlier and"):
        called(tensors, documents=torch.zeros(1, 4, dtype=torch.long))
