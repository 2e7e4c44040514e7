"""The kernels of decoding against plain PyTorch in float64, and the graphs of steps that call them."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from twoaxis.ops.cpu import library, step_kernels
from twoaxis.ops.cpu.step_kernels import LEAST_WEIGHTS, MOST_ROWS, decode_attention, few_rows, linear, replace_by_kernels

from ..compare import normal
from ..gpu.interpreted import VALUES, error, guarded

few = settings(max_examples=40)
widths = st.sampled_from([1, 7, 16, 31, 40, 99])


@pytest.fixture(autouse=True)
def steps_need_no_gradients() -> Iterator[None]:
    assert library.status() == "on"
    with torch.no_grad():
        yield


@few
@given(st.integers(0, 9), st.integers(1, 9), widths)
def test_few_rows(N: int, outputs: int, K: int) -> None:
    x, weight = normal(N, K, seed=0), normal(outputs, K, seed=1)
    got = few_rows(guarded(x.float()), guarded(weight.float()))
    assert error(got, x @ weight.T, K**0.5) <= VALUES


def test_a_row_is_the_same_among_any_others_and_with_any_threads() -> None:
    x, weight = normal(9, 200, seed=0).float(), normal(300, 200, seed=1).float()
    assert weight.numel() > 32768, "smaller ones are computed by one thread"
    alone = torch.cat([few_rows(row, weight) for row in x.split(1)])
    for rows in (2, 3, 4, 5, 9):
        assert torch.equal(few_rows(x[:rows], weight), alone[:rows])
    torch.set_num_threads(2)
    try:
        assert torch.equal(few_rows(x, weight), alone)
    finally:
        torch.set_num_threads(1)


heads = st.sampled_from([(1, 1), (2, 2), (4, 2), (6, 1)])


@few
@given(st.integers(1, 3), heads, st.sampled_from([1, 5, 64, 65, 150]), widths, widths, st.booleans())
def test_decode_attention(B: int, heads: tuple[int, int], S: int, K: int, V: int, one_mask: bool) -> None:
    H, G = heads
    q, k, v = normal(B, H, 1, K, seed=0), normal(B, G, S, K, seed=1), normal(B, G, S, V, seed=2)
    mask = normal(1 if one_mask else B, 1, 1, S, seed=3)
    hidden = normal(*mask.shape, seed=4) > 0.3
    hidden[..., -1] = False
    mask = mask.masked_fill(hidden, -torch.inf)
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True, scale=0.3)
    # Of tokens that are hidden nothing is read.
    unread = hidden.expand(B, 1, 1, S).squeeze(2).unsqueeze(-1)
    inputs = q, k.masked_fill(unread, torch.nan), v.masked_fill(unread, torch.nan), mask
    q, k, v, mask = (guarded(x.float()) for x in inputs)
    got = decode_attention(q, k, v, mask, 0.3)
    assert error(got, want, K**0.5) <= VALUES


def test_scores_may_be_far_apart_and_a_query_without_tokens_gets_zeros() -> None:
    q, k, v = torch.full((1, 1, 1, 2), 200.0), torch.tensor([[[[1.0, 0.0], [-1.0, 0.0], [0.5, 0.5]]]]), torch.ones(1, 1, 3, 4)
    mask = torch.zeros(1, 1, 1, 3)
    assert torch.equal(decode_attention(q, k, v, mask, 1.0), torch.ones(1, 1, 1, 4))
    assert torch.equal(decode_attention(q, k, v, mask - torch.inf, 1.0), torch.zeros(1, 1, 1, 4))


def test_products_of_few_rows_alone_are_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []
    monkeypatch.setattr(step_kernels, "few_rows", lambda *given: (called.append(given), few_rows(*given))[1])
    weight = torch.nn.Parameter(normal(256, LEAST_WEIGHTS // 256, seed=1).float())
    x = normal(MOST_ROWS + 1, weight.shape[1], seed=0).float()
    torch.testing.assert_close(linear(x[:3], weight), F.linear(x[:3], weight))
    assert len(called) == 1
    for other in ((x, weight), (x[:3, None], weight), (x[:3, :-1], weight[:, :-1]), (x[:3].double(), weight.double())):
        assert torch.equal(linear(*other), F.linear(*other))
    with torch.enable_grad():
        assert linear(x[:3], weight).requires_grad
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        linear(x[:3, :-1].contiguous(), weight)
    assert len(called) == 1


def replaced(rows: int, mask: torch.Tensor, queries: int = 1) -> tuple[GraphModule, list[torch.Tensor]]:
    """A graph of one product and one attention behind the pass, and its arguments."""

    def step(x: torch.Tensor, weight: torch.Tensor, k: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        y = torch.ops.aten.mm(x, torch.ops.aten.permute(weight, [1, 0]))
        q = y[:, :16].reshape(1, 2, queries, -1)
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, k, attn_mask=mask)[0]

    shapes = (rows, 128), (256, 128), (1, 2, 5, 8 * rows // queries)
    given = [*(normal(*shape, seed=index).float() for index, shape in enumerate(shapes)), mask]
    graph = make_fx(step, tracing_mode="fake")(*given)
    replace_by_kernels()(graph.graph)
    graph.recompile()
    return graph, given


def calls(graph: GraphModule) -> set[str]:
    found = {str(node.target) for node in graph.graph.nodes}
    return {name for name in found if "twoaxis" in name or "mm" in name or "flash" in name}


def test_the_pass_replaces_what_computes_the_same() -> None:
    mask = torch.tensor([0.0, -torch.inf, 0.0, 1.0, 0.0]).view(1, 1, 1, 5)
    graph, given = replaced(1, mask)
    assert calls(graph) == {"twoaxis.few_rows.default", "twoaxis.decode_attention.default"}
    x, weight, k, _ = given
    q = (x @ weight.T)[:, :16].view(1, 2, 1, 8)
    torch.testing.assert_close(graph(*given), F.scaled_dot_product_attention(q, k, k, attn_mask=mask))


def test_the_pass_leaves_everything_else() -> None:
    flash = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    many = MOST_ROWS + 1
    assert calls(replaced(many, torch.zeros(1, 1, many, 5), many)[0]) == {"aten.mm.default", flash}
    assert calls(replaced(2, torch.zeros(1, 1, 2, 5), 2)[0]) == {"twoaxis.few_rows.default", flash}
