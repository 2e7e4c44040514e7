import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from twoaxis.core.cost import visible_pairs
from twoaxis.core.errors import ConfigError
from twoaxis.core.layout import PADDING
from twoaxis.ops import local_attention as module
from twoaxis.ops.local_attention import SMALLEST_CHUNK, local_attention, visible
from twoaxis.ops.precision import Impl

from .compare import LargestTensor, assert_same, assert_within_rounding, normal, output_and_gradients

IMPLS: list[Impl] = ["fused", "reference"]


def loop_attention(window: int | None, documents: Tensor | None, key_documents: Tensor | None):  # type: ignore[no-untyped-def]
    def attend(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None) -> Tensor:
        (B, H, T, K), (_, G, S, _), V = q.shape, k.shape, v.shape[-1]
        heads = []
        for b in range(B):
            for h in range(H):
                g = h // (H // G)
                for t in range(T):
                    own = S - T + t
                    seen = [j for j in range(own + 1) if window is None or j > own - window]
                    if documents is not None and key_documents is not None:
                        seen = [j for j in seen if key_documents[b, j] == documents[b, t]]
                    if not seen:
                        nothing = 0 * (q[b, h, t].sum() + k.sum() + v.sum() + (0 if sink is None else sink.sum()))
                        heads.append(nothing.expand(V))
                        continue
                    terms = [torch.exp((q[b, h, t] * k[b, g, j]).sum() / math.sqrt(K)) for j in seen]
                    total = sum(terms)
                    if sink is not None:
                        total = total + torch.exp(sink[h] if sink.ndim == 1 else sink[b, h, t])
                    heads.append(sum(term * v[b, g, j] for term, j in zip(terms, seen, strict=True)) / total)
        return torch.stack(heads).reshape(B, H, T, V)

    return attend


@st.composite
def cases(draw: st.DrawFn) -> dict:
    G, group, past = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(0, 4))
    T = draw(st.integers(1, 7))
    window = draw(st.none() | st.integers(1, T + past + 2))
    documents = None
    row = st.lists(st.integers(PADDING, 2), min_size=T + past, max_size=T + past)
    rows = st.lists(row, min_size=2, max_size=2)
    if draw(st.booleans()):
        documents = torch.tensor(draw(rows))
    # Keys of other documents than the queries' own, so that some queries see nothing.
    key_documents = torch.tensor(draw(rows)) if documents is not None and draw(st.booleans()) else documents
    B, V = 1 if documents is None else 2, draw(st.integers(1, 3))
    sink = draw(st.sampled_from([(), (G * group,), (B, G * group, T)]))
    tensors = (normal(B, G * group, T, 2), normal(B, G, T + past, 2, seed=1), normal(B, G, T + past, V, seed=2))
    return {
        "tensors": tensors if not sink else (*tensors, normal(*sink, seed=3)),
        "window": window,
        "documents": None if documents is None else documents[:, past:],
        "key_documents": key_documents,
    }


@pytest.mark.parametrize(("impl", "chunk"), [("fused", 1), ("fused", 3), ("fused", 64), ("reference", 64)])
@given(case=cases())
@settings(max_examples=40)
def test_equals_loops(impl: Impl, chunk: int, case: dict) -> None:
    tensors, options = case["tensors"], {key: value for key, value in case.items() if key != "tensors"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SMALLEST_CHUNK", chunk)
        assert_same(
            lambda q, k, v, sink=None: local_attention(q, k, v, sink=sink, impl=impl, **options),
            loop_attention(options["window"], options["documents"], options["key_documents"]),
            tensors,
        )


@pytest.mark.parametrize("T", [SMALLEST_CHUNK - 1, SMALLEST_CHUNK, SMALLEST_CHUNK + 1, 2 * SMALLEST_CHUNK, 200])
@pytest.mark.parametrize("window", [1, 2, 63, 64, 65, 130])
@pytest.mark.parametrize("past", [0, 3, 140])
def test_engines_agree_around_the_chunk_length(T: int, window: int, past: int) -> None:
    tensors = normal(1, 2, T, 4), normal(1, 1, T + past, 4, seed=1), normal(1, 1, T + past, 4, seed=2)
    documents = (torch.arange(T + past) // 50)[None]
    options = {"window": window, "documents": documents[:, past:], "key_documents": documents}
    assert_same(
        lambda q, k, v: local_attention(q, k, v, **options),
        lambda q, k, v: local_attention(q, k, v, impl="reference", **options),
        tensors,
    )


@pytest.mark.parametrize(("window", "past"), [(None, 0), (2, 0), (2, 3), (None, 3), (9, 0)])
@pytest.mark.parametrize("impl", IMPLS)
def test_gradients_by_finite_differences(impl: Impl, window: int | None, past: int) -> None:
    leaves = [normal(1, heads, T, 2, seed=heads + T).requires_grad_() for heads, T in ((2, 3), (1, 3 + past), (1, 3 + past))]
    assert torch.autograd.gradcheck(lambda q, k, v: local_attention(q, k, v, window=window, impl=impl), leaves)


@pytest.mark.parametrize("window", [1, 2, 3, 4, 7, 8, 9])
def test_the_window_includes_the_query(window: int) -> None:
    # Case A01: the row sums of an inclusive window of 4 are 1 2 3 4 4 4 4 4.
    seen = visible(8, 8, window)
    assert seen.sum(-1).flatten().tolist() == [min(t + 1, window) for t in range(8)]
    assert seen.sum() == visible_pairs(8, window)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("window", [1, 2, 7, 8, 9])
def test_a_token_outside_the_window_is_never_seen(impl: Impl, window: int) -> None:
    q, k, v = normal(1, 1, 8, 4), normal(1, 1, 8, 4, seed=1), normal(1, 1, 8, 4, seed=2)
    before = local_attention(q, k, v, window=window, impl=impl)
    for j in range(8):
        k2, v2 = k.clone(), v.clone()
        k2[:, :, j], v2[:, :, j] = 9.0, -9.0
        changed = (local_attention(q, k2, v2, window=window, impl=impl) != before).any(-1).flatten()
        assert changed.tolist() == [0 <= t - j < window for t in range(8)]


def test_a_window_longer_than_the_text_is_full_attention() -> None:
    tensors = normal(1, 2, 8, 4), normal(1, 2, 8, 4, seed=1), normal(1, 2, 8, 4, seed=2)
    assert torch.equal(local_attention(*tensors, window=9), local_attention(*tensors))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 16])
def test_rounding(dtype: torch.dtype, window: int | None) -> None:
    inputs = normal(1, 2, 100, 8), normal(1, 1, 100, 8, seed=1), normal(1, 1, 100, 8, seed=2)
    assert_within_rounding(
        lambda q, k, v: local_attention(q, k, v, window=window),
        lambda q, k, v: local_attention(q, k, v, window=window, impl="reference"),
        inputs,
        dtype,
    )


@pytest.mark.parametrize("documents", [None, torch.arange(1024)[None] // 100])
def test_no_mask_over_all_pairs_with_a_window(documents: Tensor | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("the windowed engine built a mask over all pairs")

    monkeypatch.setattr(module, "visible", refuse)
    T, window, heads, K = 1024, 16, 2, 4
    leaves = [normal(1, heads, T, K, seed=i, dtype=torch.float32).requires_grad_() for i in range(3)]
    with LargestTensor() as seen:
        local_attention(*leaves, window=window, documents=documents, key_documents=documents).sum().backward()
    assert seen.largest <= 2 * heads * T * (SMALLEST_CHUNK + window)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("sink", [None, torch.tensor([0.5, -0.5])])
def test_a_query_that_sees_no_key_gives_zero_and_no_gradient(impl: Impl, window: int | None, sink: Tensor | None) -> None:
    # Caught: the reference was NaN, and so were the gradients of all keys and values.
    documents, key_documents = torch.tensor([[0, 1, 1, 1]]), torch.tensor([[0, 0, 0, 0, 1]])

    def attend(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = sink) -> Tensor:
        return local_attention(q, k, v, window=window, sink=sink, impl=impl, documents=documents, key_documents=key_documents)

    tensors = [normal(1, 2, 4, 4), normal(1, 2, 5, 4, seed=1), normal(1, 2, 5, 4, seed=2)]
    y, grad_q, *grads = output_and_gradients(attend, tensors if sink is None else [*tensors, sink.double()])
    assert not y[:, :, 1:3].any() and not grad_q[:, :, 1:3].any()
    assert y[:, :, [0, 3]].all() and all(grad.isfinite().all() and grad.any() for grad in grads)


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("window", [None, 3])
def test_a_sink_is_a_gate_from_the_sum_of_all_weights(window: int | None, per_token: bool) -> None:
    q, k, v = normal(2, 4, 9, 6), normal(2, 2, 9, 6, seed=1), normal(2, 2, 9, 5, seed=2)
    sink = normal(2, 4, 9, seed=3) if per_token else normal(4, seed=3)
    scores = torch.einsum("bhtk,bhsk->bhts", q, k.repeat_interleave(2, dim=1)) / math.sqrt(6)
    total = scores.masked_fill(~visible(9, 9, window), -torch.inf).logsumexp(-1)
    gate = torch.sigmoid(total - (sink if per_token else sink[:, None]))
    expected = local_attention(q, k, v, window=window) * gate.unsqueeze(-1)
    for impl in IMPLS:
        torch.testing.assert_close(local_attention(q, k, v, window=window, sink=sink, impl=impl), expected, rtol=0, atol=1e-14)


def test_one_row_of_documents_serves_all_rows() -> None:
    q, k, v = normal(2, 2, 70, 4), normal(2, 2, 75, 4, seed=1), normal(2, 2, 75, 4, seed=2)
    documents = (torch.arange(75) // 20)[None]
    for window in (None, 6):
        every, one = (
            local_attention(q, k, v, window=window, documents=rows[:, 5:], key_documents=rows)
            for rows in (documents.expand(2, -1), documents)
        )
        assert torch.equal(every, one)


def test_bad_shapes() -> None:
    q, k = torch.ones(1, 7, 2, 4), torch.ones(1, 2, 2, 4)
    with pytest.raises(ConfigError, match=r"^n_heads=7: must be a multiple of n_kv_heads=2; change one of them$"):
        local_attention(q, k, k)
    with pytest.raises(ConfigError, match=r"^window=0: must be >= 1, since it includes the query; use window=1"):
        local_attention(k, k, k, window=0)
    with pytest.raises(ConfigError, match=r"^window=True: must be >= 1, since it includes the query; use window=1"):
        local_attention(k, k, k, window=True)
    with pytest.raises(ConfigError, match=r"^queries=2: must be at most the keys=1; "):
        local_attention(k, k[:, :, :1], k[:, :, :1])
    rows = torch.zeros(1, 2, dtype=torch.long)
    with pytest.raises(ConfigError, match=r"^local_attention: got documents alone; must be both or neither; give those of"):
        local_attention(k, k, k, documents=rows)
    with pytest.raises(ConfigError, match=r"^local_attention: got key_documents alone; must be both or neither; give those of"):
        local_attention(k, k, k, key_documents=rows)
