import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from twoaxis.core.errors import ConfigError
from twoaxis.ops import causal_conv as module
from twoaxis.ops.causal_conv import causal_conv, causal_conv_sum, next_history

from .compare import assert_same, assert_within_rounding, normal


def loops(documents: list[list[int]] | None = None, dilation: int = 1):  # type: ignore[no-untyped-def]
    """The sum of convolutions written out, over tokens of one document."""

    def convolve(weights: Tensor, bias: Tensor, *sources: Tensor) -> Tensor:
        B, T, C = sources[0].shape
        k = weights.shape[-1]
        y = torch.zeros(B, T, C, dtype=bias.dtype) + bias
        for b, t, s in torch.cartesian_prod(torch.arange(B), torch.arange(T), torch.arange(k)).tolist():
            source = t - dilation * s
            if source < 0 or (documents and documents[b][t] != documents[b][source]):
                continue
            for weight, x in zip(weights, sources, strict=True):
                y[b, t] += weight[:, k - 1 - s] * x[b, source]
        return y

    return convolve


def inputs(B: int, T: int, C: int, k: int, S: int) -> list[Tensor]:
    return [normal(S, C, k, seed=1), normal(C, seed=2), *(normal(B, T, C, seed=3 + s) for s in range(S))]


sizes = {"B": st.integers(1, 3), "T": st.integers(1, 6), "C": st.integers(1, 3), "k": st.integers(1, 5)}


@pytest.mark.parametrize("impl", ["fused", "reference"])
@given(**sizes, S=st.integers(1, 3))
@settings(max_examples=15)
def test_equals_loops(impl: module.Impl, B: int, T: int, C: int, k: int, S: int) -> None:
    assert_same(lambda w, b, *x: causal_conv_sum(x, w, b, impl=impl), loops(), inputs(B, T, C, k, S))


@pytest.mark.parametrize("impl", ["fused", "reference"])
@given(**sizes, data=st.data())
@settings(max_examples=15)
def test_documents_cut_taps(impl: module.Impl, B: int, T: int, C: int, k: int, data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.lists(st.integers(-1, 2), min_size=T, max_size=T), min_size=B, max_size=B))
    documents = torch.tensor(rows)
    assert_same(lambda w, b, *x: causal_conv_sum(x, w, b, documents=documents, impl=impl), loops(rows), inputs(B, T, C, k, 2))


@pytest.mark.parametrize("impl", ["fused", "reference"])
@pytest.mark.parametrize("packed", [False, True])
@given(d=st.integers(2, 4), k=st.integers(2, 4), T=st.integers(1, 11), data=st.data())
@settings(max_examples=20)
def test_dilated_taps(impl: module.Impl, packed: bool, d: int, k: int, T: int, data: st.DataObject) -> None:
    rows = [sorted(data.draw(st.lists(st.integers(-1, 2), min_size=T, max_size=T))) for _ in range(2)] if packed else None
    documents = None if rows is None else torch.tensor(rows)
    past = data.draw(st.integers(0, T - 1))

    def ours(w: Tensor, b: Tensor, x: Tensor, y: Tensor) -> Tensor:
        options = {"dilation": d, "impl": impl}
        if not past:
            return causal_conv_sum((x, y), w, b, documents=documents, **options)  # type: ignore[arg-type]
        first = causal_conv_sum(
            (x[:, :past], y[:, :past]), w, b, documents=None if documents is None else documents[:, :past], **options
        )  # type: ignore[arg-type]
        history = (x[:, :past], y[:, :past])
        last = causal_conv_sum((x[:, past:], y[:, past:]), w, b, histories=history, documents=documents, **options)  # type: ignore[arg-type]
        return torch.cat((first, last), dim=1)

    assert_same(ours, loops(rows, d), inputs(2, T, 3, k, 2))


@pytest.mark.parametrize("impl", ["fused", "reference"])
@pytest.mark.parametrize("packed", [False, True])
@given(**sizes, data=st.data())
@settings(max_examples=15)
def test_chunks_behind_their_history(
    impl: module.Impl, packed: bool, B: int, T: int, C: int, k: int, data: st.DataObject
) -> None:
    """Outputs and gradients of any chunks, prompts shorter than the kernel included, are those of one pass."""
    cuts = [0, *sorted(data.draw(st.sets(st.integers(1, T - 1)) if T > 1 else st.just(set()))), T]
    documents = torch.arange(T).expand(B, -1) // 2 if packed else None

    def chunked(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        history, parts = None, []
        for start, stop in itertools.pairwise(cuts):
            past = 0 if history is None else history.shape[1]
            known = None if documents is None else documents[:, start - past : stop]
            chunk = x[:, start:stop]
            parts.append(causal_conv(chunk, w, bias, history=history, documents=known, impl=impl))
            history = next_history(history, chunk, k)
            assert history.shape[1] == min(stop, k - 1)
        return torch.cat(parts, dim=1)

    weights, bias, x = inputs(B, T, C, k, 1)
    assert_same(chunked, lambda x, w, b: causal_conv(x, w, b, documents=documents, impl=impl), [x, weights[0], bias])


def test_nothing_crosses_a_border_not_even_what_is_not_a_number() -> None:
    documents = torch.tensor([[0, 0, 1, 1, 1, 2, 2, 2, 2, 3, 4]])
    weights, bias, x = inputs(1, 11, 3, 4, 1)
    broken = x.clone()
    broken[:, 2:5] = torch.nan
    broken = broken.requires_grad_()
    expected = causal_conv(x, weights[0], bias, documents=documents)
    y = causal_conv(broken, weights[0], bias, documents=documents)
    others = [t for t in range(11) if t not in (2, 3, 4)]
    assert torch.equal(y[:, others], expected[:, others])
    (grad,) = torch.autograd.grad(y[:, 5:].sum(), broken)
    assert grad.isfinite().all() and not grad[:, :5].any()


def test_float32_with_borders_is_as_exact_as_the_reference() -> None:
    documents = torch.arange(200).expand(3, -1) // 17
    weights, bias, *rows = inputs(3, 200, 24, 4, 2)
    exact = causal_conv_sum(rows, weights, bias, documents=documents, impl="reference")
    single = causal_conv_sum([x.float() for x in rows], weights.float(), bias.float(), documents=documents)
    torch.testing.assert_close(single.double(), exact, rtol=0, atol=5e-6)


def test_is_the_depthwise_convolution_of_torch() -> None:
    weights, bias, x = inputs(2, 9, 5, 4, 1)
    theirs = F.conv1d(F.pad(x.transpose(1, 2), (3, 0)), weights[0].unsqueeze(1), bias, groups=5).transpose(1, 2)
    torch.testing.assert_close(causal_conv(x, weights[0], bias), theirs)


def test_the_last_tap_is_the_current_token() -> None:
    x = normal(2, 5, 3)
    identity = torch.zeros(3, 4, dtype=torch.float64)
    identity[:, -1] = 1
    assert torch.equal(causal_conv(x, identity), x)
    assert torch.equal(causal_conv(x, identity.roll(-1, dims=1))[:, 1:], x[:, :-1])


def test_a_history_is_a_value_of_its_own() -> None:
    x = normal(1, 9, 2)
    history = next_history(None, x, 4)
    assert history.untyped_storage().nbytes() == 3 * 2 * 8
    kept = history.clone()
    next_history(history, normal(1, 1, 2, seed=5), 4).zero_()
    assert torch.equal(history, kept)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 7])
def test_rounds_once(dtype: torch.dtype, tokens: int) -> None:
    def convolve(impl: module.Impl):  # type: ignore[no-untyped-def]
        def run(x: Tensor, y: Tensor, weights: Tensor, bias: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return causal_conv_sum((x, y), weights, bias, impl=impl)

        return run

    weights, bias, *sources = inputs(2, tokens, 8, 4, 2)
    assert_within_rounding(convolve("fused"), convolve("reference"), [*sources, weights, bias], dtype)


def test_what_does_not_fit_together() -> None:
    x = normal(1, 3, 2)
    with pytest.raises(ConfigError, match="1 sources, weights for 2"):
        causal_conv_sum([x], normal(2, 2, 4))
    with pytest.raises(ConfigError, match="documents of 2 tokens for 3"):
        causal_conv(x, normal(2, 4), documents=torch.zeros(1, 2, dtype=torch.long))
