import itertools
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from twoaxis.core.errors import ConfigError
from twoaxis.ops.causal_conv import causal_conv, next_history
from twoaxis.ops.precision import Impl
from twoaxis.ops.token_taps import low_rank_conv, per_head_conv

from .compare import LargestTensor, assert_same, assert_within_rounding, normal, output_and_gradients

WAYS = ("low_rank", "per_head")
CONV = {"low_rank": low_rank_conv, "per_head": per_head_conv}


def loops(way: str, documents: list[list[int]] | None = None):  # type: ignore[no-untyped-def]
    """The sum written out, over tokens of one document."""

    def convolve(x: Tensor, factors: Tensor, weight: Tensor) -> Tensor:
        B, T, C = x.shape
        y = torch.zeros_like(x)
        for b, t, s in torch.cartesian_prod(torch.arange(B), torch.arange(T), torch.arange(len(weight))).tolist():
            if s > t or (documents and documents[b][t] != documents[b][t - s]):
                continue
            for c in range(C):
                if way == "low_rank":
                    tap = factors[b, t] @ weight[s, :, c]
                else:
                    tap = factors[b, t, c * factors.shape[2] // C, s] + weight[s, c]
                y[b, t, c] += tap * x[b, t - s, c]
        return y

    return convolve


def inputs(way: str, B: int, T: int, k: int) -> list[Tensor]:
    C, R, H = 4, 3, 2
    if way == "low_rank":
        return [normal(B, T, C, seed=1), normal(B, T, R, seed=2), normal(k, R, C, seed=3)]
    return [normal(B, T, C, seed=1), normal(B, T, H, k, seed=2), normal(k, C, seed=3)]


sizes = {"B": st.integers(1, 2), "T": st.integers(1, 5), "k": st.integers(1, 4)}
every_way = pytest.mark.parametrize("way", WAYS)
both_engines = pytest.mark.parametrize("impl", ["fused", "reference"])


@every_way
@both_engines
@given(**sizes)
@settings(max_examples=10)
def test_equals_loops(way: str, impl: Impl, B: int, T: int, k: int) -> None:
    assert_same(lambda *given: CONV[way](*given, impl=impl), loops(way), inputs(way, B, T, k))


@every_way
@both_engines
@given(**sizes, data=st.data())
@settings(max_examples=10)
def test_documents_cut_taps(way: str, impl: Impl, B: int, T: int, k: int, data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.lists(st.integers(-1, 2), min_size=T, max_size=T), min_size=B, max_size=B))
    documents = torch.tensor(rows)
    assert_same(lambda *given: CONV[way](*given, documents=documents, impl=impl), loops(way, rows), inputs(way, B, T, k))


@every_way
@both_engines
@pytest.mark.parametrize("packed", [False, True])
@given(**sizes, data=st.data())
@settings(max_examples=10)
def test_chunks_behind_their_history(way: str, impl: Impl, packed: bool, B: int, T: int, k: int, data: st.DataObject) -> None:
    """Outputs and gradients of any chunks, prompts shorter than the kernel included, are those of one pass."""
    cuts = [0, *sorted(data.draw(st.sets(st.integers(1, T - 1)) if T > 1 else st.just(set()))), T]
    documents = torch.arange(T).expand(B, -1) // 2 if packed else None

    def chunked(x: Tensor, factors: Tensor, weight: Tensor) -> Tensor:
        history, parts = None, []
        for start, stop in itertools.pairwise(cuts):
            past = 0 if history is None else history.shape[1]
            known = None if documents is None else documents[:, start - past : stop]
            given = (x[:, start:stop], factors[:, start:stop], weight)
            parts.append(CONV[way](*given, history=history, documents=known, impl=impl))
            history = next_history(history, x[:, start:stop], k)
        return torch.cat(parts, dim=1)

    whole = CONV[way]
    assert_same(chunked, lambda *given: whole(*given, documents=documents, impl=impl), inputs(way, B, T, k))


@every_way
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounds_as_the_reference(way: str, dtype: torch.dtype) -> None:
    fused, reference = (partial(CONV[way], impl=impl) for impl in ("fused", "reference"))
    assert_within_rounding(fused, reference, inputs(way, 2, 40, 4), dtype)


def test_static_taps_are_a_convolution_with_the_newest_tap_first() -> None:
    x, weight = normal(2, 6, 4), normal(3, 1, 4, seed=1)
    expected = causal_conv(x, weight.squeeze(1).flip(0).T)
    torch.testing.assert_close(low_rank_conv(x, torch.ones(2, 6, 1).double(), weight), expected)
    torch.testing.assert_close(per_head_conv(x, torch.zeros(2, 6, 2, 3).double(), weight.squeeze(1)), expected)


@every_way
def test_no_tensor_is_larger_than_the_input(way: str) -> None:
    given = inputs(way, 2, 64, 4)
    with LargestTensor() as seen:
        output_and_gradients(CONV[way], given)
    assert seen.largest <= max(tensor.numel() for tensor in given)


@every_way
def test_documents_for_other_tokens_are_refused(way: str) -> None:
    with pytest.raises(ConfigError, match=r"^token taps: got documents of 3 tokens for 4; give"):
        CONV[way](*inputs(way, 1, 4, 2), documents=torch.zeros(1, 3, dtype=torch.int64))
