"""C kernels against the reference in float64: values and all gradients, over odd shapes, between numbers that are none."""

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.ops.compare import normal
from tests.ops.gpu.interpreted import GRADIENTS, VALUES, error, guarded
from twoaxis.ops.causal_conv import causal_conv_sum
from twoaxis.ops.cpu import library
from twoaxis.ops.delta import delta_writes
from twoaxis.ops.depth_attention import depth_attention, depth_summary
from twoaxis.ops.depth_read import depth_read, passing_factor, passing_read, source_factor
from twoaxis.ops.gpu import launch
from twoaxis.ops.grn import ACTIVATIONS, grn
from twoaxis.ops.mix import mix
from twoaxis.ops.precision import Impl
from twoaxis.ops.sinkhorn import Sinkhorn, sinkhorn
from twoaxis.ops.streams import mix_pieces

EPS = 1e-5
Operator = Callable[..., Tensor | tuple[Tensor, ...]]

sizes, flags = st.integers(1, 4), st.booleans()
widths = st.sampled_from([1, 7, 8, 31, 40, 99])


@pytest.fixture(autouse=True)
def called(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The kernels that a test calls; without a compiler there is nothing to test, and the environment of a run says so."""
    assert library.kernels() == "on"
    names: list[str] = []
    call = library.call
    monkeypatch.setattr(library, "call", lambda name, *arguments: (names.append(name), call(name, *arguments)))
    yield names
    assert names, "no kernel was called"


def results(operator: Operator, tensors: Sequence[Tensor]) -> list[Tensor]:
    """All results, and the gradients of all tensors."""
    leaves = [x.requires_grad_() for x in tensors]
    made = operator(*leaves)
    made = made if isinstance(made, tuple) else (made,)
    cotangents = [normal(*y.shape, seed=index).to(y.dtype) for index, y in enumerate(made)]
    found = torch.autograd.grad(made, leaves, cotangents, allow_unused=True, materialize_grads=True)
    return [*(y.detach() for y in made), *found]


def assert_equal(operator: Callable[[Impl], Operator], *shapes: Sequence[int], scale: float = 1.0) -> None:
    """The kernels, in float32, give what the reference gives in float64."""
    exact = [scale * normal(*shape, seed=index) for index, shape in enumerate(shapes)]
    want = results(operator("reference"), [x.clone() for x in exact])
    got = results(operator("fused"), [guarded(x.float()) for x in exact])
    for index, (ours, right) in enumerate(zip(got, want, strict=True)):
        allowed = VALUES if index < len(want) - len(shapes) else GRADIENTS
        assert error(ours, right, right.numel() ** 0.5) <= allowed, index


@given(S=st.integers(2, 9), H=st.sampled_from([1, 3]), K=widths, each=flags, normalised=flags, own=flags, whole=flags)
def test_depth_read(S: int, H: int, K: int, each: bool, normalised: bool, own: bool, whole: bool) -> None:
    def read(impl: Impl) -> Operator:
        def run(query: Tensor, stream: Tensor, scale: Tensor, *sources: Tensor) -> Tensor:
            factors = [source_factor(v, EPS, impl) if own else source_factor(v.detach(), EPS, impl) for v in sources]
            added = {"stream": stream, "scale": scale} if whole else {}
            values = "normalised" if normalised else "raw"
            return depth_read(sources, factors, query, impl, n_heads=H, values=values, **added)

        return run

    B, T, D = 2, 5, H * K
    assert_equal(read, (B, T, D) if each else (D,), (B, T, D), (1,), *[(B, T, D)] * S)


def test_sources_pass_their_gradients_on() -> None:
    def reads(impl: Impl) -> Operator:
        def run(query: Tensor, *sources: Tensor) -> tuple[Tensor, Tensor]:
            pairs = [passing_factor(v, EPS, impl) for v in sources]
            factors, held = [r for r, _ in pairs], [v for _, v in pairs]
            first = passing_read(held[:2], factors[:2], query, impl)
            return first.mixed, passing_read([*first.sources, held[2]], factors, 2 * query, impl).mixed

        return run

    assert_equal(reads, (33,), *[(2, 5, 33)] * 3)


@given(n=sizes, K=sizes, D=widths, each=flags, kind=st.sampled_from(["mix", "write", "read"]))
def test_mixing_of_streams(n: int, K: int, D: int, each: bool, kind: str) -> None:
    per, stream = (3, 4) if each else (), (3, 4, D)
    if kind == "mix":
        operator = lambda impl: lambda y, r, w, *x: mix_pieces(x, y, r, w, 1, impl)  # noqa: E731
        assert_equal(operator, stream, (n, n, *per), (1, n, *per), *[stream] * n)
    elif kind == "write":
        assert_equal(lambda impl: lambda y, w, *x: mix_pieces(x, y, None, w, 1, impl), stream, (1, n, *per), *[stream] * n)
    else:
        assert_equal(lambda impl: lambda r, *x: mix_pieces(x, None, r, None, 1, impl), (n, K, *per), *[stream] * n)


@given(S=st.integers(1, 9), C=sizes, D=widths, kind=st.sampled_from(["number", "token", "feature"]))
def test_mix_of_sources(S: int, C: int, D: int, kind: str) -> None:
    weights = normal(C, S, *{"number": (), "token": (3, 4), "feature": (D,)}[kind])
    sources = [normal(3, 4, D, seed=1 + s) for s in range(S)]
    with launch.without_kernels():
        want = results(lambda w, *v: mix(v, w), [weights, *(v.clone() for v in sources)])
    got = results(lambda w, *v: mix(v, w), [guarded(x.float()) for x in (weights, *sources)])
    assert all(error(ours, right, right.numel() ** 0.5) <= GRADIENTS for ours, right in zip(got, want, strict=True))


@given(C=sizes, D=widths, erases=flags)
def test_delta_write(C: int, D: int, erases: bool) -> None:
    rule = "delta" if erases else "write_only"
    shapes = (2, 5, D), (C, 2, 5), (2, 5), *[(2, 5, D)] * C
    assert_equal(lambda impl: lambda u, v, beta, *x: delta_writes(x, u, v, beta, 0.1, rule, impl), *shapes)


@given(
    n=st.integers(1, 8),
    rounds=st.sampled_from([1, 4]),
    start=st.sampled_from(["exp", "exp_minus_max", "softmax"]),
    order=st.sampled_from(["sources_first", "destinations_first"]),
    eps=st.sampled_from([0.0, 1e-2]),
)
def test_sinkhorn(n: int, rounds: int, start: str, order: str, eps: float) -> None:
    options = Sinkhorn(rounds, order, start, eps, eps)  # type: ignore[arg-type]
    assert_equal(lambda impl: lambda logits: sinkhorn(logits, options, impl), (n, n, 3, 7))


@given(S=st.integers(1, 3), C=widths, k=sizes, d=st.integers(1, 3), past=st.integers(0, 7), documents=flags, biased=flags)
def test_causal_convolution(S: int, C: int, k: int, d: int, past: int, documents: bool, biased: bool) -> None:
    known = torch.arange(past + 6).div(4, rounding_mode="floor").expand(2, -1) if documents else None

    def convolve(impl: Impl) -> Operator:
        def run(weights: Tensor, bias: Tensor, *rows: Tensor) -> Tensor:
            histories = rows[S:] if past else None
            options = {"histories": histories, "documents": known, "dilation": d, "impl": impl}
            return causal_conv_sum(rows[:S], weights, bias if biased else None, **options)  # type: ignore[arg-type]

        return run

    assert_equal(convolve, (S, C, k), (C,), *[(2, 6, C)] * S, *[(2, past, C)] * (S if past else 0))


@given(S=st.integers(1, 5), C=sizes, D=widths, shared=flags, gain=flags, activation=st.sampled_from(list(ACTIVATIONS)))
def test_generalised_residual(S: int, C: int, D: int, shared: bool, gain: bool, activation: str) -> None:
    def sums(impl: Impl) -> Operator:
        def run(bias: Tensor, weight: Tensor, g: Tensor, *sources: Tensor) -> tuple[Tensor, ...]:
            return grn(sources, bias, weight, activation, g if gain else None, EPS, impl)  # type: ignore[arg-type]

        return run

    assert_equal(sums, (C, S, D), (C, 1 if shared else S, D), (D,), *[(2, 5, D)] * S, scale=0.5)


@given(S=st.integers(1, 9), G=st.integers(1, 3), queries=st.integers(1, 3), K=widths, total=flags)
def test_attention_along_depth(S: int, G: int, queries: int, K: int, total: bool) -> None:
    shapes = (2, 5, G * queries if total else G, K), *[(2, 5, G, K)] * (2 * S)

    def attend(q: Tensor, *sources: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        given = q, sources[:S], sources[S:]
        return depth_summary(*given) if total else depth_attention(*given)

    exact = [normal(*shape, seed=index) for index, shape in enumerate(shapes)]
    want = results(attend, [x.clone() for x in exact])
    got = results(attend, [guarded(x.float()) for x in exact])
    assert all(error(ours, right, right.numel() ** 0.5) <= GRADIENTS for ours, right in zip(got, want, strict=True))
