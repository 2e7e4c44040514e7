from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from twoaxis.core.errors import ConfigError
from twoaxis.ops import mix
from twoaxis.ops.depth_read import depth_read, depth_weights, softmax_mix, source_factor
from twoaxis.ops.norm import inverse_rms
from twoaxis.ops.precision import Impl

from .compare import LargestTensor, assert_same, assert_within_rounding, normal, output_and_gradients

IMPLS: list[Impl] = ["fused", "reference"]
EPS = 1e-6


def loop_read(query: Tensor, sources: list[Tensor]) -> Tensor:
    factors = [1 / torch.sqrt((v * v).sum(-1) / v.shape[-1] + EPS) for v in sources]
    mixed = torch.zeros_like(sources[0])
    for b in range(mixed.shape[0]):
        for t in range(mixed.shape[1]):
            terms = [torch.exp(r[b, t] * (query * v[b, t]).sum()) for v, r in zip(sources, factors, strict=True)]
            for v, term in zip(sources, terms, strict=True):
                place = torch.zeros_like(mixed)
                place[b, t] = 1
                mixed = mixed + place * (term / sum(terms) * v[b, t])
    return mixed


def on(n: int, read: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda query, *tensors: read(query, list(tensors[:n]))


def engine(impl: Impl) -> Callable[..., Tensor]:
    return lambda query, sources: depth_read(sources, [inverse_rms(v, EPS) for v in sources], query, impl)


def inputs(n: int, B: int, T: int, D: int) -> list[Tensor]:
    sources = [normal(B, T, D, seed=i) * 3.0**i for i in range(n)]
    return [normal(D, seed=77), *sources]


@pytest.mark.parametrize("impl", IMPLS)
@given(n=st.integers(2, 4), B=st.integers(1, 2), T=st.integers(1, 2), D=st.integers(1, 3))
@settings(max_examples=12)
def test_equals_loops(impl: Impl, n: int, B: int, T: int, D: int) -> None:
    assert_same(on(n, engine(impl)), on(n, loop_read), inputs(n, B, T, D))


@pytest.mark.parametrize("impl", IMPLS)
def test_one_source_is_read_as_it_is(impl: Impl) -> None:
    query, source = inputs(1, 2, 3, 5)
    source.requires_grad_()
    mixed = depth_read([source], [inverse_rms(source, EPS)], query, impl)
    torch.testing.assert_close(mixed, source, rtol=0, atol=0)
    (gradient,) = torch.autograd.grad(mixed.sum(), source)
    torch.testing.assert_close(gradient, torch.ones_like(source), rtol=0, atol=0)


@pytest.mark.parametrize("impl", IMPLS)
def test_gradients_by_finite_differences(impl: Impl) -> None:
    leaves = [tensor.requires_grad_() for tensor in inputs(3, 1, 2, 3)]
    assert torch.autograd.gradcheck(on(3, engine(impl)), leaves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding(dtype: torch.dtype) -> None:
    query, *sources = [normal(33, seed=77), *(normal(2, 8, 33, seed=i) for i in range(5))]

    def read(impl: Impl) -> Callable[..., Tensor]:
        return lambda q, *vs: depth_read(vs, [inverse_rms(v, EPS) for v in vs], q, impl)

    # In float32 the mean of the weights' gradients is taken from the mixture, which has been rounded once.
    factor = 4 if dtype == torch.float32 else 2
    assert_within_rounding(read("fused"), read("reference"), [query, *sources], dtype, factor)


@pytest.mark.parametrize("impl", IMPLS)
def test_autocast_changes_nothing(impl: Impl) -> None:
    given = [tensor.float() for tensor in inputs(3, 1, 4, 8)]
    plain = output_and_gradients(on(3, engine(impl)), given)
    with torch.autocast("cpu", torch.bfloat16):
        cast = output_and_gradients(on(3, engine(impl)), given)
    assert all(torch.equal(a, b) for a, b in zip(plain, cast, strict=True))


def test_weights_sum_to_one_also_for_huge_scores() -> None:
    sources = [normal(1, 3, 4, seed=i, dtype=torch.float32) for i in range(3)]
    factors = [torch.full((1, 3), 1e4) for _ in sources]
    weights = depth_weights(sources, factors, torch.full((4,), 1e4))
    torch.testing.assert_close(weights.sum(0), torch.ones(1, 3))
    assert depth_read(sources, factors, torch.full((4,), 1e4)).isfinite().all()


def saved_storages(n: int, impl: Impl = "fused") -> tuple[int, int]:
    """Bytes that autograd saves for one read of n sources: in all, and beyond the inputs and the output."""
    query, *rest = inputs(n, 2, 8, 16)
    leaves = [query.float().requires_grad_(), *(tensor.float().requires_grad_() for tensor in rest)]
    held = {tensor.untyped_storage().data_ptr() for tensor in leaves}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        mixed = on(n, engine(impl))(*leaves)
    held.add(mixed.untyped_storage().data_ptr())
    return sum(saved.values()), sum(size for pointer, size in saved.items() if pointer not in held)


def test_saved_bytes_are_linear_in_the_sources() -> None:
    tokens, D, element = 2 * 8, 16, 4
    for n in (4, 8, 16, 24):
        total, extra = saved_storages(n)
        assert extra == 3 * n * tokens * element, "one score, one weight and one inverse rms per source and token"
        assert total - extra <= (D + (n + 1) * tokens * D) * element, "query, sources, output"
    _, by_reference = saved_storages(4, "reference")
    assert by_reference > saved_storages(4)[1], "the plain engine saves more, so the count can tell them apart"


def test_sources_are_never_stacked() -> None:
    n, B, T, D = 8, 2, 8, 32
    leaves = [tensor.requires_grad_() for tensor in inputs(n, B, T, D)]
    with LargestTensor() as seen:
        on(n, engine("fused"))(*leaves).sum().backward()
    assert seen.largest <= B * T * D


def test_mismatched_sources() -> None:
    v, r, q = torch.ones(1, 2, 4), torch.ones(1, 2), torch.ones(4)
    with pytest.raises(ConfigError, match=r"^depth_read: got 0 sources and 0 inverse rms; give one of each per source$"):
        depth_read([], [], q)
    with pytest.raises(ConfigError, match="got 2 sources and 1 inverse rms"):
        depth_read([v, v], [r], q)
    with pytest.raises(ConfigError, match=r"source 1 is \(1, 2, 4\) torch.float64 on cpu: must be like source 0"):
        depth_read([v, v.double()], [r, r], q)


def factored(sources: list[Tensor], impl: Impl) -> list[Tensor]:
    return [source_factor(v, EPS, impl) for v in sources]


@pytest.mark.parametrize("n_heads", [1, 2, 4])
@pytest.mark.parametrize("each", [False, True])
def test_engines_agree_with_heads_and_a_query_per_token(n_heads: int, each: bool) -> None:
    query = normal(2, 3, 8, seed=77) if each else normal(8, seed=77)

    def read(impl: Impl) -> Callable[..., Tensor]:
        return lambda q, *vs: depth_read(vs, factored(list(vs), impl), q, impl, n_heads=n_heads)

    assert_same(read("fused"), read("reference"), [query, *(normal(2, 3, 8, seed=i) * 3.0**i for i in range(4))])


def test_heads_are_reads_of_slices_with_the_whole_norm() -> None:
    query, *sources = inputs(3, 2, 3, 6)
    factors = factored(sources, "reference")
    slices = [depth_read([v[..., c : c + 3] for v in sources], factors, query[c : c + 3], "reference") for c in (0, 3)]
    got = depth_read(sources, factors, query, n_heads=2)
    torch.testing.assert_close(got, torch.cat(slices, dim=-1), rtol=0, atol=1e-12)


def test_equal_queries_of_all_tokens_are_one_query() -> None:
    query, *sources = inputs(3, 2, 3, 5)
    factors = factored(sources, "fused")
    got = depth_read(sources, factors, query.expand(2, 3, 5))
    torch.testing.assert_close(got, depth_read(sources, factors, query), rtol=0, atol=1e-12)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("impl", IMPLS)
def test_added_to_a_stream_with_a_scale(impl: Impl, n: int) -> None:
    query, *sources = inputs(n, 2, 3, 5)
    stream, scale = normal(2, 3, 5, seed=8), torch.tensor([0.7], dtype=torch.float64)

    def added(q: Tensor, x: Tensor, a: Tensor, *vs: Tensor) -> Tensor:
        return x + a * depth_read(vs, factored(list(vs), "reference"), q, "reference")

    def at_once(q: Tensor, x: Tensor, a: Tensor, *vs: Tensor) -> Tensor:
        # A single source is read whatever the query is, which then has no gradient in the fused engine.
        return depth_read(vs, factored(list(vs), impl), q, impl, stream=x, scale=a) + 0 * q.sum()

    assert_same(at_once, added, [query, stream, scale, *sources])
    torch.testing.assert_close(depth_read(sources, factored(sources, impl), query, impl, scale=0 * scale), 0 * stream)


@pytest.mark.parametrize("impl", IMPLS)
def test_gradient_through_an_inverse_rms_arrives_either_way(impl: Impl) -> None:
    """With a gradient of its own or as a statistic, the inverse rms of a source leads to the same gradients."""

    def statistic(q: Tensor, *vs: Tensor) -> Tensor:
        return depth_read(vs, [inverse_rms(v, EPS) for v in vs], q, impl)

    def own(q: Tensor, *vs: Tensor) -> Tensor:
        return depth_read(vs, factored(list(vs), impl), q, impl)

    assert_same(own, statistic, inputs(3, 2, 3, 5))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("factors", ["own", "statistic"])
@pytest.mark.parametrize(("n", "n_heads"), [(1, 1), (3, 1), (3, 2)])
def test_normalised_values_are_the_read_of_normalised_sources(impl: Impl, factors: str, n: int, n_heads: int) -> None:
    """Written out over vectors that are normalised first; gradients pass through the factors of scores and of values."""
    query, *sources = inputs(n, 2, 3, 6)
    stream, scale = normal(2, 3, 6, seed=8), torch.tensor([0.7], dtype=torch.float64)

    def written_out(q: Tensor, x: Tensor, a: Tensor, *vs: Tensor) -> Tensor:
        units = torch.stack([v / (v.square().mean(-1, keepdim=True) + EPS).sqrt() for v in vs])
        by_head = units.unflatten(-1, (n_heads, -1))
        weights = torch.softmax((by_head * q.unflatten(-1, (n_heads, -1))).sum(-1, keepdim=True), dim=0)
        return x + a * (weights * by_head).sum(0).flatten(-2)

    def read(q: Tensor, x: Tensor, a: Tensor, *vs: Tensor) -> Tensor:
        rms = factored(list(vs), impl) if factors == "own" else [inverse_rms(v, EPS) for v in vs]
        return depth_read(vs, rms, q, impl, n_heads=n_heads, stream=x, scale=a, values="normalised")

    assert_same(read, written_out, [query, stream, scale, *sources])


def test_a_source_scaled_by_a_hundred_keeps_all_weights() -> None:
    query, *sources = [normal(6, seed=77), *(normal(2, 3, 6, seed=i) for i in range(4))]
    scaled = [sources[0], 100 * sources[1], *sources[2:]]
    eps = 1e-16
    weights = [depth_weights(vs, [inverse_rms(v, eps) for v in vs], query) for vs in (sources, scaled)]
    torch.testing.assert_close(*weights, rtol=0, atol=1e-12)


@pytest.mark.parametrize("H", [1, 3])
def test_softmax_mix_engines_agree(H: int) -> None:
    def mixed(impl: Impl) -> Callable[..., Tensor]:
        return lambda logits, *vs: softmax_mix(vs, logits, impl)

    assert_same(mixed("fused"), mixed("reference"), [normal(4, 2, 3, H, seed=7), *(normal(2, 3, 6, seed=i) for i in range(4))])
    with pytest.raises(ConfigError, match="got 1 values and logits for 4"):
        softmax_mix([normal(2, 3, 6)], normal(4, 2, 3, H))


@pytest.mark.parametrize("n_heads", [1, 2])
def test_blocks_of_rows_change_nothing(n_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    query, *sources = inputs(3, 2, 5, 4)

    def read(q: Tensor, *vs: Tensor) -> Tensor:
        return depth_read(vs, factored(list(vs), "fused"), q, n_heads=n_heads)

    whole = output_and_gradients(read, [query, *sources])
    for numbers in (1, 12):
        monkeypatch.setattr(mix, "BLOCK_NUMBERS", numbers)
        for got, expected in zip(output_and_gradients(read, [query, *sources]), whole, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-13, atol=1e-13)


def test_source_factor_by_finite_differences() -> None:
    v = normal(1, 2, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda v: source_factor(v, EPS), v)
    assert source_factor(normal(1, 2, 3, dtype=torch.bfloat16), EPS).dtype == torch.float32
