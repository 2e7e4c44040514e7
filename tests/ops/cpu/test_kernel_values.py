"""C kernels against the reference in float64: values and all gradients, over odd shapes, between numbers that are none."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from twoaxis.ops import kernels
from twoaxis.ops.causal_conv import causal_conv_sum
from twoaxis.ops.cpu import library
from twoaxis.ops.delta import delta_writes
from twoaxis.ops.depth_attention import depth_attention, depth_summary
from twoaxis.ops.depth_read import depth_read, passing_factor, passing_read, source_factor
from twoaxis.ops.gated_linear import silu_gate
from twoaxis.ops.grn import ACTIVATIONS, grn
from twoaxis.ops.hyper_read import ScoreRule, hyper_read
from twoaxis.ops.mix import mix
from twoaxis.ops.norm import rms_norm
from twoaxis.ops.precision import Impl
from twoaxis.ops.rope import RotationTable, rotate, rotation
from twoaxis.ops.sinkhorn import Sinkhorn, sinkhorn
from twoaxis.ops.streams import mix_pieces

from ..compare import normal
from ..gpu.interpreted import GRADIENTS, VALUES, error, guarded

EPS = 1e-5
Operator = Callable[..., Tensor | tuple[Tensor, ...]]

few = settings(max_examples=40)
sizes, flags = st.integers(1, 4), st.booleans()
widths = st.sampled_from([1, 7, 8, 31, 40, 99])
Rows = tuple[int, int]
tokens = st.sampled_from([(2, 5), (3, 50)])
"""Sequences and positions: fewer than the parts of a sum over them, and more."""


CALLED: list[str] = []


@pytest.fixture(autouse=True)
def kernels_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a compiler there is nothing to test, and the environment of a run says so."""
    assert library.status() == "on"
    call = library.call
    monkeypatch.setattr(library, "call", lambda name, *arguments: (CALLED.append(name), call(name, *arguments)))


def results(operator: Operator, tensors: Sequence[Tensor], wanted: Sequence[int] | None = None) -> list[Tensor]:
    """All results, and the gradients of all tensors, or of some."""
    wanted = range(len(tensors)) if wanted is None else wanted
    leaves = [x.requires_grad_(index in wanted) for index, x in enumerate(tensors)]
    made = operator(*leaves)
    made = made if isinstance(made, tuple) else (made,)
    cotangents = [(y, normal(*y.shape, seed=index).to(y.dtype)) for index, y in enumerate(made) if y.requires_grad]
    asked = [leaves[index] for index in wanted]
    found = torch.autograd.grad(
        [y for y, _ in cotangents], asked, [c for _, c in cotangents], allow_unused=True, materialize_grads=True
    )
    return [*(y.detach() for y in made), *found]


def assert_same(
    name: str, ours: Operator, reference: Operator, *shapes: Sequence[int], scale: float = 1.0, backward: bool = True
) -> None:
    """This kernel and that of its gradient, in float32, give what the reference gives in float64."""
    exact = [scale * normal(*shape, seed=index) for index, shape in enumerate(shapes)]
    with kernels.without_kernels():
        want = results(reference, [x.clone() for x in exact])
    CALLED.clear()
    got = results(ours, [guarded(x.float()) for x in exact])
    assert name in CALLED and (f"{name}_backward" in CALLED or not backward), CALLED
    n_made = len(want) - len(shapes)
    for index, (one, right) in enumerate(zip(got, want, strict=True)):
        assert error(one, right, right.numel() ** 0.5) <= (VALUES if index < n_made else GRADIENTS), index
    # A gradient that nobody asks for is written nowhere, and changes no other.
    for last in [index for index, grad in enumerate(got[n_made:]) if grad.any()][-1:]:
        some = results(ours, [guarded(x.float()) for x in exact], [last])
        assert all(torch.equal(a, b) for a, b in zip(some, [*got[:n_made], got[n_made + last]], strict=True))


def assert_equal(name: str, operator: Callable[[Impl], Operator], *shapes: Sequence[int], scale: float = 1.0) -> None:
    """The same, of an operator with an engine."""
    assert_same(name, operator("fused"), operator("reference"), *shapes, scale=scale)


@few
@given(
    S=st.integers(2, 9), H=st.sampled_from([1, 3]), K=widths, each=flags, normalised=flags, own=flags, whole=flags, rows=tokens
)
def test_depth_read(S: int, H: int, K: int, each: bool, normalised: bool, own: bool, whole: bool, rows: Rows) -> None:
    def read(impl: Impl) -> Operator:
        def run(query: Tensor, stream: Tensor, scale: Tensor, *sources: Tensor) -> Tensor:
            factors = [source_factor(v, EPS, impl) if own else source_factor(v.detach(), EPS, impl) for v in sources]
            added = {"stream": stream, "scale": scale} if whole else {}
            values = "normalised" if normalised else "raw"
            return depth_read(sources, factors, query, impl, n_heads=H, values=values, **added)

        return run

    (B, T), D = rows, H * K
    assert_equal("depth_read", read, (B, T, D) if each else (D,), (B, T, D), (1,), *[(B, T, D)] * S)


@pytest.mark.parametrize(("rows", "D"), [((2, 5), 33), ((4, 512), 264)])
def test_sources_pass_their_gradients_on(rows: Rows, D: int) -> None:
    def reads(impl: Impl) -> Operator:
        def run(query: Tensor, *sources: Tensor) -> tuple[Tensor, Tensor]:
            pairs = [passing_factor(v, EPS, impl) for v in sources]
            factors, held = [r for r, _ in pairs], [v for _, v in pairs]
            first = passing_read(held[:2], factors[:2], query, impl)
            return first.mixed, passing_read([*first.sources, held[2]], factors, 2 * query, impl).mixed

        return run

    assert_equal("depth_read", reads, (D,), *[(*rows, D)] * 3)


@few
@given(n=sizes, K=sizes, D=widths, each=flags, kind=st.sampled_from(["mix", "write", "read"]), rows=tokens)
def test_mixing_of_streams(n: int, K: int, D: int, each: bool, kind: str, rows: Rows) -> None:
    per, stream = rows if each else (), (*rows, D)
    matrix, row = (n, n if kind == "mix" else K, *per), (1, n, *per)

    def mixed(impl: Impl) -> Operator:
        if kind == "mix":
            return lambda y, r, w, *x: mix_pieces(x, y, r, w, 1, impl)
        if kind == "write":
            return lambda y, w, *x: mix_pieces(x, y, None, w, 1, impl)
        return lambda r, *x: mix_pieces(x, None, r, None, 1, impl)

    weights = {"mix": (stream, matrix, row), "write": (stream, row), "read": (matrix,)}[kind]
    assert_equal("mix_streams", mixed, *weights, *[stream] * n)


@few
@given(S=st.integers(1, 9), C=sizes, D=widths, kind=st.sampled_from(["number", "token", "feature"]), rows=tokens)
def test_mix_of_sources(S: int, C: int, D: int, kind: str, rows: Rows) -> None:
    each = {"number": (), "token": rows, "feature": (D,)}[kind]
    name = "causal_conv" if kind == "feature" else "mix_streams"

    def sums(w: Tensor, *v: Tensor) -> tuple[Tensor, ...]:
        return mix(v, w)

    assert_same(name, sums, sums, (C, S, *each), *[(*rows, D)] * S)


@few
@given(
    n=sizes, m=st.integers(1, 3), E=widths, extra=sizes, rule=st.tuples(st.sampled_from(["layer", "rms"]), flags), rows=tokens
)
def test_dynamic_read(n: int, m: int, E: int, extra: int, rule: tuple[Any, bool], rows: Rows) -> None:
    norm, bounded = rule
    scored = ScoreRule(norm, EPS, "tanh" if bounded else "none", m)

    def read(impl: Impl) -> Operator:
        def run(static: Tensor, scale: Tensor, maps: Tensor, offset: Tensor, *streams: Tensor) -> tuple[Tensor, ...]:
            found = hyper_read(streams, static, scale, maps, offset, scored, impl)
            return found.view, found.weights, *found.streams

        return run

    C = m + extra
    assert_equal("hyper_read", read, (n * m, C), (C,), (C, E), (C,), *[(*rows, m * E)] * n, scale=0.5)


def test_hyperbolic_tangents_of_all_sizes() -> None:
    sizes = torch.cat([torch.linspace(0, 12, 40), torch.logspace(-30, 0, 20), torch.tensor([torch.inf])])
    offset = torch.cat([sizes, -sizes, torch.tensor([torch.nan])]).split(library.MOST_TENSORS)
    for some in offset:
        C, stream = len(some), torch.zeros(1, 1, 1)
        rule = ScoreRule("rms", 1.0, "tanh")
        found = hyper_read([stream], torch.zeros(1, C), torch.ones(C), torch.ones(C, 1), some, rule).weights.flatten()
        assert "hyper_read" in CALLED
        torch.testing.assert_close(found, some[1:].double().tanh().float(), rtol=3e-7, atol=0, equal_nan=True)


@few
@given(C=sizes, D=widths, erases=flags, rows=tokens)
def test_delta_write(C: int, D: int, erases: bool, rows: Rows) -> None:
    rule = "delta" if erases else "write_only"
    shapes = (*rows, D), (C, *rows), rows, *[(*rows, D)] * C
    assert_equal("delta_write", lambda impl: lambda u, v, beta, *x: delta_writes(x, u, v, beta, 0.1, rule, impl), *shapes)


@few
@given(
    n=st.integers(1, 8),
    rounds=st.sampled_from([1, 4]),
    start=st.sampled_from(["exp", "exp_minus_max", "softmax"]),
    order=st.sampled_from(["sources_first", "destinations_first"]),
    eps=st.sampled_from([0.0, 1e-2]),
    rows=tokens,
)
def test_sinkhorn(n: int, rounds: int, start: Any, order: Any, eps: float, rows: Rows) -> None:
    options = Sinkhorn(rounds, order, start, eps, eps)
    assert_equal("sinkhorn", lambda impl: lambda logits: sinkhorn(logits, options, impl), (n, n, *rows))


@few
@given(
    S=st.integers(1, 3),
    C=widths,
    k=sizes,
    d=st.integers(1, 3),
    past=st.integers(0, 7),
    documents=flags,
    biased=flags,
    rows=tokens,
)
def test_causal_convolution(S: int, C: int, k: int, d: int, past: int, documents: bool, biased: bool, rows: Rows) -> None:
    B, T = rows
    known = torch.arange(past + T).div(4, rounding_mode="floor").expand(B, -1) if documents else None

    def convolve(impl: Impl) -> Operator:
        def run(weights: Tensor, bias: Tensor, *tensors: Tensor) -> Tensor:
            histories = tensors[S:] if past else None
            given = tensors[:S], weights, bias if biased else None
            return causal_conv_sum(*given, histories=histories, documents=known, dilation=d, impl=impl)

        return run

    assert_equal("causal_conv", convolve, (S, C, k), (C,), *[(B, T, C)] * S, *[(B, past, C)] * (S if past else 0))


@few
@given(
    S=st.integers(1, 5), C=sizes, D=widths, shared=flags, gain=flags, activation=st.sampled_from(list(ACTIVATIONS)), rows=tokens
)
def test_generalised_residual(S: int, C: int, D: int, shared: bool, gain: bool, activation: Any, rows: Rows) -> None:
    def sums(impl: Impl) -> Operator:
        def run(bias: Tensor, weight: Tensor, g: Tensor, *sources: Tensor) -> tuple[Tensor, ...]:
            return grn(sources, bias, weight, activation, g if gain else None, EPS, impl)

        return run

    assert_equal("grn", sums, (C, S, D), (C, 1 if shared else S, D), (D,), *[(*rows, D)] * S, scale=0.5)


@few
@given(S=st.integers(1, 9), G=st.integers(1, 3), queries=st.integers(1, 3), K=widths, total=flags, rows=tokens)
def test_attention_along_depth(S: int, G: int, queries: int, K: int, total: bool, rows: Rows) -> None:
    shapes = (*rows, G * queries if total else G, K), *[(*rows, G, K)] * (2 * S)

    def attend(q: Tensor, *sources: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        given = q, sources[:S], sources[S:]
        return depth_summary(*given) if total else depth_attention(*given)

    assert_same("depth_attention", attend, attend, *shapes)


@pytest.mark.parametrize(
    ("test", "given"),
    [
        (test_depth_read, {"S": 4, "H": 2, "K": 64, "each": False, "normalised": False, "own": False, "whole": False}),
        (test_mixing_of_streams, {"n": 4, "K": 4, "D": 128, "each": True, "kind": "mix"}),
        (test_mixing_of_streams, {"n": 4, "K": 4, "D": 128, "each": True, "kind": "write"}),
        (test_dynamic_read, {"n": 4, "m": 1, "E": 128, "extra": 2, "rule": ("layer", True)}),
        (test_dynamic_read, {"n": 4, "m": 2, "E": 64, "extra": 2, "rule": ("rms", False)}),
        (test_delta_write, {"C": 4, "D": 128, "erases": True}),
        (test_attention_along_depth, {"S": 4, "G": 2, "queries": 1, "K": 64, "total": True}),
        # More channels than are taken together.
        (test_causal_convolution, {"S": 1, "C": 520, "k": 4, "d": 1, "past": 2, "documents": False, "biased": True}),
        (test_causal_convolution, {"S": 2, "C": 520, "k": 3, "d": 2, "past": 0, "documents": True, "biased": False}),
    ],
)
def test_results_that_bypass_the_caches(test: Any, given: dict[str, Any]) -> None:
    test.hypothesis.inner_test(**given, rows=(4, 512))


@few
@given(F=st.sampled_from([1, 7, 8, 19]), large=flags, rows=tokens)
def test_gate(F: int, large: bool, rows: Rows) -> None:
    assert_equal("silu_gate", lambda impl: lambda x: silu_gate(x, impl), (*rows, 2 * F), scale=30.0 if large else 1.0)


@pytest.mark.parametrize("F", [3, 16])
def test_gates_far_from_zero_saturate(F: int) -> None:
    x, none = torch.ones(8, 2 * F), float("nan")
    x[:, :F] = torch.tensor([-3e38, -1e30, -200.0, -88.0, 88.0, 200.0, 1e30, -float("inf")]).unsqueeze(1)
    y = silu_gate(x.requires_grad_())
    y.sum().backward()
    assert x.grad is not None
    want = torch.tensor([0.0, 0.0, 0.0, 0.0, 88.0, 200.0, 1e30, none])
    torch.testing.assert_close(y, want.unsqueeze(1).expand(-1, F), atol=1e-30, rtol=0, equal_nan=True)
    slope = torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, none])
    torch.testing.assert_close(x.grad[:, :F], slope.unsqueeze(1).expand(-1, F), atol=1e-30, rtol=0, equal_nan=True)
    assert silu_gate(torch.full((1, 2 * F), none)).isnan().all()


@few
@given(D=widths, gain=flags, scale=st.sampled_from([1.0, 0.5]), rows=tokens)
def test_rms_norm(D: int, gain: bool, scale: float, rows: Rows) -> None:
    assert_equal("rms_norm", lambda impl: lambda x, g: rms_norm(x, g if gain else None, EPS, impl, scale), (*rows, D), (D,))


@few
@given(B=st.integers(1, 3), T=st.integers(1, 5), H=st.integers(1, 3), K=st.sampled_from([2, 10, 32]), each=flags, joint=flags)
def test_rotation(B: int, T: int, H: int, K: int, each: bool, joint: bool) -> None:
    positions = torch.arange(B * T).view(B, T) if each else torch.arange(T).unsqueeze(0)
    table = RotationTable(width=K, theta=100.0)

    def rotated(x: Tensor) -> Tensor:
        own = x[..., : H * K].unflatten(-1, (H, K)) if joint else x.unflatten(-1, (H, K))
        return rotate(own, rotation(positions, table, x.dtype))

    assert_same("rotate", rotated, rotated, (B, T, H * K + (6 if joint else 0)), backward=False)


def test_the_largest_dynamic_read() -> None:
    n = C = library.MOST_TENSORS
    rule = ScoreRule("rms", 0)  # A whole number for eps.

    def read(impl: Impl) -> Operator:
        def run(static: Tensor, maps: Tensor, *streams: Tensor) -> tuple[Tensor, ...]:
            found = hyper_read(streams, static, torch.ones(C, dtype=maps.dtype), maps, None, rule, impl)
            return found.view, found.weights

        return run

    assert_equal("hyper_read", read, (n, C), (C, 3), *[(1, 2, 3)] * n, scale=0.5)


def test_numbers_that_are_none_stay_so_in_a_dynamic_read() -> None:
    stream, rule = torch.ones(1, 2, 4), ScoreRule("layer", EPS)
    stream[0, 1, 2] = torch.inf
    found = hyper_read([stream], torch.zeros(1, 2), torch.ones(2), torch.ones(2, 4), None, rule)
    assert found.weights[..., 1].isnan().all() and found.weights[..., 0].isfinite().all()


BROADCAST: dict[str, tuple[Operator, list[tuple[int, ...]]]] = {
    "a query for all sequences": (lambda q, a, b: depth_read([a, b], [a[..., 0], b[..., 0]], q), [(1, 1, 8), *[(2, 3, 8)] * 2]),
    "one weight per source with an axis": (lambda w, a, b: mix([a, b], w), [(1, 2, 1), *[(2, 3, 8)] * 2]),
}
"""By what PyTorch broadcasts: an operator, and its shapes."""


@pytest.mark.parametrize("name", BROADCAST)
def test_what_is_broadcast_is_computed_right(name: str) -> None:
    operator, shapes = BROADCAST[name]
    exact = [normal(*shape, seed=index) for index, shape in enumerate(shapes)]
    want, got = results(operator, [x.clone() for x in exact]), results(operator, [guarded(x.float()) for x in exact])
    assert all(error(ours, right, right.numel() ** 0.5) <= GRADIENTS for ours, right in zip(got, want, strict=True))


def test_each_source_of_a_read_has_a_gradient_through_its_rms_or_a_factor_with_one() -> None:
    def read(impl: Impl) -> Operator:
        return lambda q, a, b: depth_read([a, b], [source_factor(a, EPS, impl), source_factor(b.detach(), EPS, impl)], q, impl)

    exact = [normal(*shape, seed=seed) for seed, shape in enumerate([(9,), (2, 3, 9), (2, 3, 9)])]
    want, got = (
        results(read("reference"), [x.clone() for x in exact]),
        results(read("fused"), [guarded(x.float()) for x in exact]),
    )
    assert all(error(ours, right, right.numel() ** 0.5) <= GRADIENTS for ours, right in zip(got, want, strict=True))
