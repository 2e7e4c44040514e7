import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from twoaxis.core.errors import ConfigError
from twoaxis.core.measure import Operations, saved_for_backward, storage_bytes
from twoaxis.ops.mix import head_by_head, mix, mix_heads
from twoaxis.ops.precision import Impl

from .compare import assert_same, normal

EACH = ("number", "token", "feature")


def weights(each: str, C: int, S: int, B: int, T: int, D: int) -> Tensor:
    return normal(C, S, *{"number": (), "token": (B, T), "feature": (D,)}[each], seed=1)


def loops(w: Tensor, *sources: Tensor) -> Tensor:
    rows = []
    for way in w:
        total = torch.zeros_like(sources[0])
        for b, t, d in torch.cartesian_prod(*(torch.arange(n) for n in sources[0].shape)).tolist():
            for v, weight in zip(sources, way, strict=True):
                total[b, t, d] += v[b, t, d] * (weight[b, t] if w.ndim == 4 else weight[d] if w.ndim == 3 else weight)
        rows.append(total)
    return torch.stack(rows)


def mixed(w: Tensor, *sources: Tensor) -> Tensor:
    return torch.stack(mix(sources, w))


@pytest.mark.parametrize("each", EACH)
@given(C=st.integers(1, 4), S=st.integers(1, 3), B=st.integers(1, 2), T=st.integers(1, 2), D=st.integers(1, 3))
@settings(max_examples=10)
def test_equals_loops(each: str, C: int, S: int, B: int, T: int, D: int) -> None:
    inputs = [weights(each, C, S, B, T, D), *(normal(B, T, D, seed=2 + s) for s in range(S))]
    assert_same(mixed, loops, inputs)


def test_numbers_do_not_make_half_precision_sums() -> None:
    sources = [normal(2, 3, 64, seed=s, dtype=torch.bfloat16) for s in range(12)]
    w = weights("number", 1, 12, 2, 3, 64).float()
    exact = mix([v.double() for v in sources], w.double())[0].to(torch.bfloat16)
    assert (mix(sources, w)[0] != exact).float().mean() < 0.01


def test_an_unused_way_has_no_part_in_the_gradients() -> None:
    sources = [normal(1, 2, 3, seed=s).requires_grad_() for s in range(2)]
    w = weights("token", 2, 2, 1, 2, 3).requires_grad_()
    first, _ = mix(sources, w)
    first.sum().backward()
    assert w.grad is not None
    assert torch.equal(w.grad[1], torch.zeros(2, 1, 2, dtype=w.dtype))


def test_weights_for_another_number_of_sources() -> None:
    with pytest.raises(ConfigError, match="got 1 sources and weights for 2"):
        mix([normal(1, 1, 2)], torch.ones(1, 2))


def one_product(w: Tensor, *sources: Tensor) -> Tensor:
    """All heads of all sources in one tensor."""
    heads = [head for source in sources for head in source.unbind(2)]
    return (torch.stack(heads, dim=-1) @ w.T).movedim(-1, 2)


@pytest.mark.parametrize("impl", ["fused", "reference"])
@given(C=st.integers(1, 3), H=st.integers(1, 3), S=st.integers(1, 3), T=st.integers(0, 2), D=st.integers(1, 3))
@settings(max_examples=10)
def test_heads_equal_one_product(impl: Impl, C: int, H: int, S: int, T: int, D: int) -> None:
    sources = [normal(2, T, H, D, seed=2 + s) for s in range(S)]
    inputs = [normal(C, S * H, seed=1), head_by_head(sources[0]), *sources[1:]]
    assert_same(lambda w, *sources: mix_heads(sources, w, impl), one_product, inputs)


def test_heads_in_half_precision_are_summed_in_float32_and_saved_as_they_are() -> None:
    """A sum in half precision is wrong in most elements; a saved float32 copy of a source is as large again twice."""
    sources = [normal(2, 3, 2, 8, seed=s, dtype=torch.bfloat16).requires_grad_() for s in range(8)]
    w = normal(2, 16, seed=9).float().requires_grad_()
    exact = mix_heads([v.double() for v in sources], w.double()).to(torch.bfloat16)
    with saved_for_backward() as saved:
        found = mix_heads(sources, w)
    assert (found != exact).float().mean() < 0.02
    assert storage_bytes(saved) == storage_bytes([w, *sources])


def test_a_source_head_by_head_in_memory_is_not_copied() -> None:
    x = head_by_head(normal(2, 3, 4, 5))
    names = list[str]()
    with Operations(lambda operation: names.append(operation.name)):
        mix_heads([x, x], normal(4, 8))
    assert names.count("mm") + names.count("addmm") == 2 and not {"clone", "copy"} & set(names)


def test_weights_for_another_number_of_heads() -> None:
    with pytest.raises(ConfigError, match="mix_heads: got 4 heads and weights for 3"):
        mix_heads([normal(1, 1, 2, 3)] * 2, torch.ones(1, 3))
