import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from twoaxis.core.errors import ConfigError
from twoaxis.core.layout import PADDING
from twoaxis.core.measure import product_flops
from twoaxis.ops import gated_delta as module
from twoaxis.ops.gated_delta import gated_delta
from twoaxis.ops.precision import Impl

from .compare import LargestTensor, assert_same, assert_within_rounding, normal, output_and_gradients

IMPLS: list[Impl] = ["fused", "reference"]
CHUNK = module.LARGEST_CHUNK
sizes = {
    "B": st.integers(1, 2),
    "H": st.integers(1, 2),
    "T": st.integers(1, 11),
    "K": st.integers(1, 4),
    "V": st.integers(1, 4),
}


def inputs(B: int, H: int, T: int, K: int, V: int) -> list[Tensor]:
    """Queries, keys of length 1, values, decay, gates and a state."""
    q, k = normal(B, H, T, K), F.normalize(normal(B, H, T, K, seed=1), dim=-1)
    decay_log, beta = -F.softplus(normal(B, H, T, seed=3)), torch.sigmoid(normal(B, H, T, seed=4))
    return [q, k, normal(B, H, T, V, seed=2), decay_log, beta, normal(B, H, V, K, seed=5)]


def flat(y: Tensor, state: Tensor) -> Tensor:
    return torch.cat((y.flatten(), state.flatten().to(y.dtype)))


def operator(impl: Impl, documents: Tensor | None = None) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor, decay_log: Tensor, beta: Tensor, state: Tensor | None = None) -> Tensor:
        return flat(*gated_delta(q, k, v, decay_log, beta, state=state, documents=documents, impl=impl))

    return run


def equation(documents: list[list[int]] | None = None) -> Callable[..., Tensor]:
    """Equation 10 of the paper, head by head and matrix by matrix; documents include the one of the state."""

    def run(q: Tensor, k: Tensor, v: Tensor, decay_log: Tensor, beta: Tensor, state: Tensor) -> Tensor:
        B, H, T, K = q.shape
        y, last = torch.zeros_like(v), torch.zeros_like(state)
        for b, h in itertools.product(range(B), range(H)):
            S = state[b, h]
            for t in range(T):
                if documents and documents[b][t] != documents[b][t + 1]:
                    S = 0 * S
                key, gate = k[b, h, t], beta[b, h, t]
                kept = decay_log[b, h, t].exp() * (torch.eye(K, dtype=q.dtype) - gate * torch.outer(key, key))
                S = S @ kept + gate * torch.outer(v[b, h, t], key)
                y[b, h, t] = S @ q[b, h, t]
            last[b, h] = S
        return flat(y, last)

    return run


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("chunk", [1, 4, CHUNK])
@given(**sizes)
@settings(max_examples=10)
def test_equals_the_equation(impl: Impl, chunk: int, B: int, H: int, T: int, K: int, V: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "LARGEST_CHUNK", chunk)
        assert_same(operator(impl), equation(), inputs(B, H, T, K, V))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("chunk", [3, CHUNK])
@given(**sizes, data=st.data())
@settings(max_examples=15)
def test_documents_start_from_zero(impl: Impl, chunk: int, B: int, H: int, T: int, K: int, V: int, data: st.DataObject) -> None:
    row = st.lists(st.integers(PADDING, 1), min_size=T + 1, max_size=T + 1)
    documents = data.draw(st.lists(row, min_size=B, max_size=B))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "LARGEST_CHUNK", chunk)
        assert_same(operator(impl, torch.tensor(documents)), equation(documents), inputs(B, H, T, K, V))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("tokens", [CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5])
def test_engines_agree_on_whole_chunks(tokens: int, packed: bool) -> None:
    documents = torch.tensor([30, 0]).unsqueeze(1) + torch.arange(tokens + 1) // 50 if packed else None
    assert_same(operator("fused", documents), operator("reference", documents), inputs(2, 2, tokens, 5, 3))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("packed", [False, True])
@given(**sizes, data=st.data())
@settings(max_examples=10)
def test_pieces_behind_their_state(
    impl: Impl, packed: bool, B: int, H: int, T: int, K: int, V: int, data: st.DataObject
) -> None:
    """Outputs, states and gradients of any pieces are those of one pass."""
    cuts = [0, *sorted(data.draw(st.sets(st.integers(1, T - 1)) if T > 1 else st.just(set()))), T]
    documents = torch.arange(T).expand(B, -1) // 3 if packed else None

    def pieces(q: Tensor, k: Tensor, v: Tensor, decay_log: Tensor, beta: Tensor) -> Tensor:
        state, parts = None, []
        for start, stop in itertools.pairwise(cuts):
            known = None if documents is None else documents[:, max(0, start - 1) : stop]
            given = (x[:, :, start:stop] for x in (q, k, v, decay_log, beta))
            y, state = gated_delta(*given, state=state, documents=known, impl=impl)
            parts.append(y)
        assert state is not None
        return flat(torch.cat(parts, dim=2), state)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "LARGEST_CHUNK", 4)
        assert_same(pieces, operator(impl, documents), inputs(B, H, T, K, V)[:5])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("border", [0, 1, 40, CHUNK + 20, 2 * CHUNK])
def test_nothing_crosses_a_border(impl: Impl, dtype: torch.dtype, border: int) -> None:
    """Not in the last bit of values, and not in gradients, wherever in a chunk the document changes."""
    tokens = 2 * CHUNK + 22
    documents = (torch.arange(-1, tokens).unsqueeze(0) >= border).long()
    given = [x.to(dtype) for x in inputs(1, 2, tokens, 4, 3)]
    changed = [x.clone() for x in given]
    for x in changed[:5]:
        x[:, :, :border] = 3 * x[:, :, :border] - 0.25 * x[:, :, :border].abs()
    changed[5] = 7 * changed[5]
    results = []
    for one in (given, changed):
        leaves = [x.requires_grad_() for x in one]
        y, state = gated_delta(*leaves[:5], state=leaves[5], documents=documents, impl=impl)
        results.append((y[:, :, border:], state))
        gradients = torch.autograd.grad(y[:, :, border:].square().sum() + state.square().sum(), leaves)
        assert all(not gradient[:, :, :border].any() for gradient in gradients[:5]) and not gradients[5].any()
        # What a token keeps of the state before it is nothing where its document begins.
        assert not gradients[3][:, :, border].any() and all(gradient[:, :, border + 1 :].any() for gradient in gradients[:5])
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
    alone = gated_delta(*(x[:, :, border:] for x in given[:5]), impl=impl)
    for ours, theirs in zip(results[0], alone, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=64 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("impl", IMPLS)
def test_padding_is_a_document_like_any_other(impl: Impl) -> None:
    given = inputs(2, 1, 9, 3, 3)[:5]
    padded, other = (torch.tensor([[one] * 5 + [0] * 4, [one] * 2 + [0] * 7]) for one in (PADDING, 5))
    assert torch.equal(operator(impl, padded)(*given), operator(impl, other)(*given))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("tokens", [1, 7, CHUNK + 9])
def test_closed_gates_keep_the_state(impl: Impl, tokens: int) -> None:
    q, k, v, decay_log, beta, state = inputs(2, 2, tokens, 4, 3)
    y, last = gated_delta(q, k, v, torch.zeros_like(decay_log), torch.zeros_like(beta), state=state, impl=impl)
    assert torch.equal(last, state)
    torch.testing.assert_close(y, q @ state.transpose(-1, -2))


@pytest.mark.parametrize("impl", IMPLS)
def test_open_gates_overwrite_what_a_key_held(impl: Impl) -> None:
    tokens, K = CHUNK + 9, 4
    _, _, v, decay_log, beta, state = inputs(1, 2, tokens, K, 3)
    key = torch.arange(tokens) % 3
    # Whole numbers, which are added without rounding.
    v, state = (4 * v).round(), (4 * state).round()
    k = F.one_hot(key, K).double().expand(1, 2, -1, -1)
    y, last = gated_delta(k, k, v, torch.zeros_like(decay_log), torch.ones_like(beta), state=state, impl=impl)
    assert torch.equal(y, v)
    for column in range(3):
        assert torch.equal(last[..., column], v[:, :, int((key == column).nonzero().max())])
    assert torch.equal(last[..., 3], state[..., 3])


@pytest.mark.parametrize("impl", IMPLS)
def test_a_state_that_is_forgotten_at_once(impl: Impl) -> None:
    q, k, v, decay_log, beta, state = inputs(1, 1, CHUNK + 9, 4, 3)
    leaves = [x.requires_grad_() for x in (q, k, v, beta, state)]
    y, _ = gated_delta(q, k, v, torch.full_like(decay_log, -torch.inf), beta, state=state, impl=impl)
    torch.testing.assert_close(y, beta.unsqueeze(-1) * (q * k).sum(-1, keepdim=True) * v)
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(y.sum(), leaves))


def test_gradients_by_finite_differences() -> None:
    documents = torch.tensor([[0, 0, 0, 1, 1, 1]])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "LARGEST_CHUNK", 3)
        leaves = [x.requires_grad_() for x in inputs(1, 1, 5, 2, 3)]
        assert torch.autograd.gradcheck(operator("fused", documents), leaves)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rounds_once(dtype: torch.dtype) -> None:
    def autocast(impl: Impl) -> Callable[..., Tensor]:
        def run(v: Tensor, q: Tensor, k: Tensor, decay_log: Tensor, beta: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return gated_delta(q, k, v, decay_log, beta, impl=impl)[0]

        return run

    q, k, v, decay_log, beta, _ = inputs(1, 2, CHUNK + 9, 8, 6)
    assert_within_rounding(autocast("fused"), autocast("reference"), [v, q, k, decay_log, beta], dtype)


def test_the_state_is_never_in_half_precision() -> None:
    for dtype, wide in ((torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)):
        y, state = gated_delta(*(x.to(dtype) for x in inputs(1, 1, 3, 2, 2)[:5]))
        assert (y.dtype, state.dtype) == (dtype, wide)


@pytest.mark.parametrize("beta", [0.5, 0.99])
def test_tokens_that_share_a_key(beta: float) -> None:
    """Where powers of the matrix to invert would reach 1e18, the engine errs no more than the recurrence."""
    q, k, v, decay_log, gate, _ = inputs(1, 1, 4 * CHUNK, 16, 16)
    given = [v, q, k[:, :, :1].expand_as(k), torch.zeros_like(decay_log), torch.full_like(gate, beta)]

    def run(impl: Impl) -> Callable[..., Tensor]:
        return lambda v, q, k, decay_log, beta: gated_delta(q, k, v, decay_log, beta, impl=impl)[0]

    assert_within_rounding(run("fused"), run("reference"), given, torch.float32, factor=4)


def test_work_and_memory_grow_with_tokens_alone() -> None:
    H, K, V, C = 2, 3, 5, CHUNK
    largest = []
    for n in (2, 4):
        given = inputs(1, H, n * C, K, V)[:5]
        per_token = 2 * (C * (2 * K + V) + K * K + 3 * K * V) + 2 * K * K * V // C
        products, between = product_flops(lambda given=given: gated_delta(*given))
        assert products == between == H * n * (2 * (C * C * (2 * K + V) + C * (K * K + 3 * K * V) + K * K * V))
        assert abs(products / (H * n * C) - per_token) <= 1
        assert product_flops(lambda given=given: gated_delta(*given, impl="reference"))[0] == 6 * K * V * H * n * C
        with LargestTensor() as seen:
            output_and_gradients(lambda *x: gated_delta(*x)[0].to(x[0].dtype), given)
        largest.append(seen.largest)
    assert largest[1] == 2 * largest[0]


def test_what_does_not_fit_together() -> None:
    q, k, v, decay_log, beta, state = inputs(1, 1, 3, 2, 2)
    documents = torch.zeros(1, 3, dtype=torch.long)
    with pytest.raises(ConfigError, match="documents of 3 tokens for 3; give those of the new tokens, and of the one before"):
        gated_delta(q, k, v, decay_log, beta, state=state, documents=documents)
    with pytest.raises(ConfigError, match=r"documents of 2 tokens for 3; give those of the new tokens$"):
        gated_delta(q, k, v, decay_log, beta, documents=documents[:, :2])
