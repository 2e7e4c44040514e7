from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.functional import hessian

from twoaxis.core.errors import ConfigError
from twoaxis.ops.depth_read import depth_read, depth_weights, softmax_mix, source_factor
from twoaxis.ops.norm import inverse_rms

from .compare import LargestTensor, assert_same, normal, output_and_gradients

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


def read_all(query: Tensor, sources: list[Tensor]) -> Tensor:
    return depth_read(sources, [inverse_rms(v, EPS) for v in sources], query)


def inputs(n: int, B: int, T: int, D: int) -> list[Tensor]:
    sources = [normal(B, T, D, seed=i) * 3.0**i for i in range(n)]
    return [normal(D, seed=77), *sources]


@given(n=st.integers(2, 4), B=st.integers(1, 2), T=st.integers(1, 2), D=st.integers(1, 3))
@settings(max_examples=12)
def test_equals_loops(n: int, B: int, T: int, D: int) -> None:
    assert_same(on(n, read_all), on(n, loop_read), inputs(n, B, T, D))


def test_one_source_is_read_as_it_is() -> None:
    query, source = inputs(1, 2, 3, 5)
    source.requires_grad_()
    mixed = depth_read([source], [inverse_rms(source, EPS)], query)
    torch.testing.assert_close(mixed, source, rtol=0, atol=0)
    (gradient,) = torch.autograd.grad(mixed.sum(), source)
    torch.testing.assert_close(gradient, torch.ones_like(source), rtol=0, atol=0)


def test_gradients_by_finite_differences() -> None:
    leaves = [tensor.requires_grad_() for tensor in inputs(3, 1, 2, 3)]
    assert torch.autograd.gradcheck(on(3, read_all), leaves)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("factor", [inverse_rms, lambda v, eps: source_factor(v, eps, "reference")])
def test_derivatives_in_forward_mode_and_of_second_order(factor: Callable[[Tensor, float], Tensor]) -> None:
    query, first, *others = (tensor.double() for tensor in inputs(3, 1, 2, 3))

    def fused(v: Tensor) -> Tensor:
        sources = [v, *others]
        return depth_read(sources, [factor(each, EPS) for each in sources], query, impl="reference")

    def plain(v: Tensor) -> Tensor:
        sources = torch.stack([v, *others])
        scores = (sources * query).sum(-1) / torch.sqrt(sources.square().mean(-1) + EPS)
        return (torch.softmax(scores, 0).unsqueeze(-1) * sources).sum(0)

    direction = normal(1, 2, 3, seed=5).double()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(first, direction)
        moved, expected = (forward_ad.unpack_dual(read(dual)).tangent for read in (fused, plain))
    torch.testing.assert_close(moved, expected, rtol=0, atol=1e-12)
    found, expected = (hessian(lambda v, read=read: read(v).square().sum(), first) for read in (fused, plain))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)


def test_autocast_changes_nothing() -> None:
    given = [tensor.float() for tensor in inputs(3, 1, 4, 8)]
    plain = output_and_gradients(on(3, read_all), given)
    with torch.autocast("cpu", torch.bfloat16):
        cast = output_and_gradients(on(3, read_all), given)
    assert all(torch.equal(a, b) for a, b in zip(plain, cast, strict=True))


def test_a_scaled_source_is_rounded_once() -> None:
    stream, source = (normal(2, 8, 33, seed=seed, dtype=torch.bfloat16) for seed in range(2))
    scale = torch.tensor([0.7], dtype=torch.bfloat16)
    exact = (stream.double() + scale.double() * source.double()).bfloat16()
    assert torch.equal(depth_read([source], [inverse_rms(source, EPS)], torch.ones(33), stream=stream, scale=scale), exact)


def test_weights_sum_to_one_also_for_huge_scores() -> None:
    sources = [normal(1, 3, 4, seed=i, dtype=torch.float32) for i in range(3)]
    factors = [torch.full((1, 3), 1e4) for _ in sources]
    weights = depth_weights(sources, factors, torch.full((4,), 1e4))
    torch.testing.assert_close(weights.sum(0), torch.ones(1, 3))
    assert depth_read(sources, factors, torch.full((4,), 1e4)).isfinite().all()


def saved_storages(n: int) -> tuple[int, int]:
    """Bytes that autograd saves for one read of n sources: in all, and beyond the inputs and the output."""
    query, *rest = inputs(n, 2, 8, 16)
    leaves = [query.float().requires_grad_(), *(tensor.float().requires_grad_() for tensor in rest)]
    held = {tensor.untyped_storage().data_ptr() for tensor in leaves}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        mixed = depth_read(leaves[1:], factored(leaves[1:]), leaves[0])
    held.add(mixed.untyped_storage().data_ptr())
    return sum(saved.values()), sum(size for pointer, size in saved.items() if pointer not in held)


def test_saved_bytes_are_linear_in_the_sources() -> None:
    tokens, D, element = 2 * 8, 16, 4
    for n in (4, 8, 16, 24):
        total, extra = saved_storages(n)
        # C kernels copy the inverse rms and save the logarithm of the sum, plain PyTorch saves weights.
        assert extra <= (3 * n + 1) * tokens * element, "three numbers per source and token, and one per token"
        assert total - extra <= (D + (n + 1) * tokens * D) * element, "query, sources, output"


def test_sources_are_never_stacked() -> None:
    n, B, T, D = 8, 2, 8, 32
    leaves = [tensor.requires_grad_() for tensor in inputs(n, B, T, D)]
    with LargestTensor() as seen:
        on(n, read_all)(*leaves).sum().backward()
    assert seen.largest <= B * T * D


def test_mismatched_sources() -> None:
    v, r, q = torch.ones(1, 2, 4), torch.ones(1, 2), torch.ones(4)
    with pytest.raises(ConfigError, match=r"^depth_read: got 0 sources and 0 inverse rms; give one of each per source$"):
        depth_read([], [], q)
    with pytest.raises(ConfigError, match="got 2 sources and 1 inverse rms"):
        depth_read([v, v], [r], q)
    with pytest.raises(ConfigError, match=r"source 1 is \(1, 2, 4\) torch.float64 on cpu: must be like source 0"):
        depth_read([v, v.double()], [r, r], q)


def factored(sources: list[Tensor]) -> list[Tensor]:
    return [source_factor(v, EPS) for v in sources]


def test_heads_are_reads_of_slices_with_the_whole_norm() -> None:
    query, *sources = inputs(3, 2, 3, 6)
    factors = factored(sources)
    slices = [depth_read([v[..., c : c + 3] for v in sources], factors, query[c : c + 3]) for c in (0, 3)]
    got = depth_read(sources, factors, query, n_heads=2)
    torch.testing.assert_close(got, torch.cat(slices, dim=-1), rtol=0, atol=1e-12)


def test_equal_queries_of_all_tokens_are_one_query() -> None:
    query, *sources = inputs(3, 2, 3, 5)
    factors = factored(sources)
    got = depth_read(sources, factors, query.expand(2, 3, 5))
    torch.testing.assert_close(got, depth_read(sources, factors, query), rtol=0, atol=1e-12)


@pytest.mark.parametrize("n", [1, 3])
def test_added_to_a_stream_with_a_scale(n: int) -> None:
    query, *sources = inputs(n, 2, 3, 5)
    stream, scale = normal(2, 3, 5, seed=8), torch.tensor([0.7], dtype=torch.float64)

    def added(q: Tensor, x: Tensor, a: Tensor, *vs: Tensor) -> Tensor:
        # A single source is read whatever the query is, which then has no gradient.
        return x + a * depth_read(vs, factored(list(vs)), q) + 0 * q.sum()

    def at_once(q: Tensor, x: Tensor, a: Tensor, *vs: Tensor) -> Tensor:
        return depth_read(vs, factored(list(vs)), q, stream=x, scale=a) + 0 * q.sum()

    assert_same(at_once, added, [query, stream, scale, *sources])
    torch.testing.assert_close(depth_read(sources, factored(sources), query, scale=0 * scale), 0 * stream)


def test_gradient_through_an_inverse_rms_arrives_either_way() -> None:
    """With a gradient of its own or as a statistic, the inverse rms of a source leads to the same gradients."""

    def statistic(q: Tensor, *vs: Tensor) -> Tensor:
        return depth_read(vs, [inverse_rms(v, EPS) for v in vs], q)

    def own(q: Tensor, *vs: Tensor) -> Tensor:
        return depth_read(vs, factored(list(vs)), q)

    assert_same(own, statistic, inputs(3, 2, 3, 5))


@pytest.mark.parametrize("factors", ["own", "statistic"])
@pytest.mark.parametrize(("n", "n_heads"), [(1, 1), (3, 1), (3, 2)])
def test_normalised_values_are_the_read_of_normalised_sources(factors: str, n: int, n_heads: int) -> None:
    """Written out over vectors that are normalised first; gradients pass through the factors of scores and of values."""
    query, *sources = inputs(n, 2, 3, 6)
    stream, scale = normal(2, 3, 6, seed=8), torch.tensor([0.7], dtype=torch.float64)

    def written_out(q: Tensor, x: Tensor, a: Tensor, *vs: Tensor) -> Tensor:
        units = torch.stack([v / (v.square().mean(-1, keepdim=True) + EPS).sqrt() for v in vs])
        by_head = units.unflatten(-1, (n_heads, -1))
        weights = torch.softmax((by_head * q.unflatten(-1, (n_heads, -1))).sum(-1, keepdim=True), dim=0)
        return x + a * (weights * by_head).sum(0).flatten(-2)

    def read(q: Tensor, x: Tensor, a: Tensor, *vs: Tensor) -> Tensor:
        rms = factored(list(vs)) if factors == "own" else [inverse_rms(v, EPS) for v in vs]
        return depth_read(vs, rms, q, n_heads=n_heads, stream=x, scale=a, values="normalised")

    assert_same(read, written_out, [query, stream, scale, *sources])


def test_a_source_scaled_by_a_hundred_keeps_all_weights() -> None:
    query, *sources = [normal(6, seed=77), *(normal(2, 3, 6, seed=i) for i in range(4))]
    scaled = [sources[0], 100 * sources[1], *sources[2:]]
    eps = 1e-16
    weights = [depth_weights(vs, [inverse_rms(v, eps) for v in vs], query) for vs in (sources, scaled)]
    torch.testing.assert_close(*weights, rtol=0, atol=1e-12)


@pytest.mark.parametrize("H", [1, 3])
def test_softmax_mix_weighs_each_head(H: int) -> None:
    def written_out(logits: Tensor, *vs: Tensor) -> Tensor:
        heads = torch.stack(vs).unflatten(-1, (H, -1))
        return (torch.softmax(logits, dim=0).unsqueeze(-1) * heads).sum(0).flatten(2)

    assert_same(
        lambda logits, *vs: softmax_mix(vs, logits),
        written_out,
        [normal(4, 2, 3, H, seed=7), *(normal(2, 3, 6, seed=i) for i in range(4))],
    )
    with pytest.raises(ConfigError, match="got 1 values and logits for 4"):
        softmax_mix([normal(2, 3, 6)], normal(4, 2, 3, H))


def test_source_factor_by_finite_differences() -> None:
    v = normal(1, 2, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda v: source_factor(v, EPS), v)
    assert source_factor(normal(1, 2, 3, dtype=torch.bfloat16), EPS).dtype == torch.float32
