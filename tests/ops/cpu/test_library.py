"""When C kernels serve a call, and what is said where they cannot be compiled."""

import importlib
import os
import pkgutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad, gradgradcheck
from torch.utils._pytree import tree_leaves

from twoaxis import ops
from twoaxis.core.errors import ConfigError
from twoaxis.core.files import try_lock
from twoaxis.ops import kernels
from twoaxis.ops.causal_conv import causal_conv
from twoaxis.ops.cpu import library
from twoaxis.ops.cross_entropy import linear_cross_entropy
from twoaxis.ops.delta import delta_writes
from twoaxis.ops.depth_attention import depth_attention
from twoaxis.ops.depth_read import depth_read, source_factor
from twoaxis.ops.gated_linear import silu_gate
from twoaxis.ops.gated_read import gated_read
from twoaxis.ops.grn import grn
from twoaxis.ops.hyper_read import ScoreRule, hyper_read
from twoaxis.ops.local_attention import local_attention
from twoaxis.ops.mix import mix
from twoaxis.ops.ngram_gate import ngram_gate
from twoaxis.ops.norm import inverse_rms, layer_norm, rms_norm
from twoaxis.ops.precision import Impl, plain_forms
from twoaxis.ops.reflected_attention import path_attention
from twoaxis.ops.rope import rotate
from twoaxis.ops.scores import joint_scores, linear_scores, row_product, stream_scores
from twoaxis.ops.sinkhorn import Sinkhorn, sinkhorn
from twoaxis.ops.streams import mix_pieces
from twoaxis.ops.token_taps import low_rank_conv
from twoaxis.ops.weight_mlp import weight_mlp
from twoaxis.train.environment import describe_environment

from ...fresh import run_fresh
from ..compare import normal

SAY = """import torch
from twoaxis.ops.cpu import library
print("compiles" if library.must_compile() else "has", library.status(), library.served(torch.ones(1)), sep=" | ")
"""


class Subclass(Tensor):
    """A tensor that may keep its numbers elsewhere."""


def said(**environment: str) -> str:
    """What a process of its own says of the kernels."""
    given = {**os.environ, "CC": "", **environment}
    ran = run_fresh(SAY, env=given)
    assert not ran.returncode and not ran.stderr
    return ran.stdout.strip()


def test_they_serve_float32_on_a_cpu_and_nothing_else() -> None:
    x = torch.ones(2)
    assert library.status() == "on" and library.served(x) and library.served(nn.Parameter(x))
    others = x.double(), x.bfloat16(), x.to("meta"), x.as_subclass(Subclass)
    assert not any(map(library.served, others))
    with kernels.without_kernels():
        assert library.status() == "off: TWOAXIS_KERNELS=off" and not library.served(x)
    with plain_forms():
        assert not library.served(x)
    assert library.served(x)


def test_operators_leave_what_they_do_not_serve_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, *arguments: object) -> None:
        raise AssertionError(f"{name} was called")

    monkeypatch.setattr(library, "call", refuse)
    v, q = [torch.ones(1, 2, 4) for _ in range(64)], torch.ones(4)
    factors = [torch.ones(1, 2) for _ in v]
    depth_read(v, factors, q)
    depth_read(v[:2], factors[:2], q.double())
    depth_read([x.double() for x in v[:2]], factors[:2], q)
    depth_read(v[:2], factors[:2], q, "reference")
    mix_pieces(v[:1], None, torch.ones(2, 2), None, 2)
    delta_writes(v[:1], v[0], torch.ones(1, 1, 2), torch.ones(1, 2, dtype=torch.float64), 0.1)
    with pytest.raises(AssertionError, match=r"^depth_read was called"):
        depth_read(v[:63], factors[:63], q)


def test_the_number_of_threads_changes_no_bit() -> None:
    shape, found = (4, 300, 96), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        try:
            sources = [normal(*shape, seed=seed).float().requires_grad_() for seed in range(4)]
            query = normal(96).float().requires_grad_()
            read = depth_read(sources, [source_factor(v, 1e-6) for v in sources], query)
            weights = normal(5, 2).float().requires_grad_()
            mixed = mix_pieces([read, *sources], None, weights, None, 1)
            torch.stack(mixed).sin().sum().backward()
            found.append([*(y.detach() for y in mixed), query.grad, weights.grad, *(v.grad for v in sources)])
        finally:
            torch.set_num_threads(1)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_rows_may_lie_anywhere_in_memory() -> None:
    sources = [normal(2, 5, 2 * 9, seed=seed).float()[..., ::2] for seed in range(3)]
    odd = [torch.empty(91)[1:].view(2, 5, 9).copy_(v) for v in sources]
    query, factors = normal(9).float(), [torch.ones(2, 5) for _ in sources]
    want = depth_read([v.contiguous() for v in sources], factors, query)
    assert torch.equal(depth_read(sources, factors, query), want) and torch.equal(depth_read(odd, factors, query), want)
    empty = [v[:0].requires_grad_() for v in sources]
    depth_read(empty, [r[:0] for r in factors], query).sum().backward()
    assert empty[0].grad is not None and empty[0].grad.shape == (0, 5, 9)


def test_gradients_that_are_not_in_memory_yet_are_as_any_other() -> None:
    x, w = normal(1, 6, 3).float(), normal(3, 2).float()

    def gradient(through: Callable[[Tensor], Tensor]) -> Tensor:
        own = x.clone().requires_grad_()
        through(causal_conv(own, w)).sum().backward()
        assert own.grad is not None
        return own.grad

    assert not gradient(torch.sgn).any(), "zeros without memory"
    for lazily in (Negated.apply, torch.neg):
        torch.testing.assert_close(gradient(lazily), -gradient(lambda y: y))


class Negated(torch.autograd.Function):
    """Passes on a gradient whose numbers are those of another tensor, to be read with the other sign."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return -x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return torch._neg_view(grads[0].contiguous())


def test_a_gradient_of_another_class_is_refused_and_not_read() -> None:
    x, result = torch.ones(2, 4), torch.empty(2, 2)
    with torch.no_grad(), pytest.raises(ConfigError, match="got a Subclass: must be a plain tensor; set TWOAXIS_KERNELS=off"):
        library.call("silu_gate", x.as_subclass(Subclass), result, 2, 2)


@pytest.mark.filterwarnings("ignore")
def test_what_watches_the_operations_of_pytorch_sees_them() -> None:
    x, v = normal(2, 3, 8).float(), normal(2, 3, 8).float()
    with torch.no_grad():
        traced: Any = torch.jit.trace(silu_gate, x, check_trace=False)
        with forward_ad.dual_level():
            tangent = forward_ad.unpack_dual(silu_gate(forward_ad.make_dual(x, v))).tangent
        batched = torch.func.vmap(silu_gate)(x)
    torch.testing.assert_close(traced(v), silu_gate(v))
    torch.testing.assert_close(batched, silu_gate(x))
    want = torch.func.jvp(lambda one: silu_gate(one, "reference"), (x,), (v,))[1]
    torch.testing.assert_close(tangent, want)


X, Y, WIDTH = (1, 3, 4), (1, 3), (4,)
HEADS = (1, 3, 2, 4)
RULE = ScoreRule("layer", 1e-3)
TARGETS = torch.tensor([0, 4, 2])


def turn(x: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines for three tokens."""
    angles = torch.arange(6).to(x).view(1, 3, 1, 2)
    return angles.cos().repeat(1, 1, 1, 2), torch.cat((-angles.sin(), angles.sin()), dim=-1)


def reflected(i: Impl, q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor) -> Tensor:
    """PaTH attention with directions of length 1."""
    return path_attention(q, k, v, w / w.norm(dim=-1, keepdim=True), 2 * beta.sigmoid(), impl=i)[0]


def beside(i: Impl, q: Tensor, k: Tensor, v: Tensor, score: Tensor, value: Tensor) -> Tensor:
    """Attention with one more key for each query."""
    return local_attention(q, k, v, beside=(score, value), impl=i)


BY_OPERATOR: dict[str, tuple[Callable[..., Any], Sequence[tuple[int, ...]]]] = {
    "causal_conv": (lambda i, x, w: causal_conv(x, w, impl=i), [X, (4, 2)]),
    "delta_writes": (lambda i, x, y, u, t, b: delta_writes((x, y), u, t, b, 0.1, impl=i), [X, X, X, (2, 1, 3), Y]),
    "depth_attention": (lambda i, q, k, v: depth_attention(q, [k, q], [v, k]), [HEADS] * 3),
    "depth_read": (lambda i, x, y, q: depth_read((x, y), [source_factor(v, 1e-3, i) for v in (x, y)], q, i), [X, X, WIDTH]),
    "depth_read of statistics": (
        lambda i, x, y, q: depth_read((x, y), [inverse_rms(v, 1e-3) for v in (x, y)], q, i),
        [X, X, WIDTH],
    ),
    "gated_read": (lambda i, x, y, g, a, b: gated_read((x, y), g, a, b, None, 1e-3, i)[0], [X, X, (2, 4), (2, 8), (8, 2)]),
    "grn": (lambda i, x, y, b, w: grn((x, y), b, w, "gelu", impl=i), [X, X, (2, 2, 4), (2, 2, 4)]),
    "hyper_read": (lambda i, x, y, s, g, w: hyper_read((x, y), s, g, w, None, RULE, i)[:2], [X, X, (2, 3), (3,), (3, 4)]),
    "joint_scores of a frozen map": (lambda i, x, y: joint_scores((x, y), normal(3, 8).to(x), 1e-3, i), [X, X]),
    "layer_norm": (lambda i, x, g, b: layer_norm(x, 1e-3, i, g, b), [X, WIDTH, WIDTH]),
    "layer_norm alone": (lambda i, x: layer_norm(x, 1e-3, i), [X]),
    "linear_cross_entropy": (lambda i, h, w: linear_cross_entropy(h, w, TARGETS, i), [(3, 4), (5, 4)]),
    "linear_scores": (lambda i, x, w: linear_scores(x, w, i), [X, (2, 4)]),
    "local_attention with a key beside": (beside, [(1, 2, 3, 4)] * 3 + [(1, 2, 3), (1, 2, 3, 4)]),
    "low_rank_conv": (lambda i, x, z, w: low_rank_conv(x, z, w, impl=i), [X, (1, 3, 2), (2, 2, 4)]),
    "mix": (lambda i, x, y, w: mix((x, y), w), [X, X, (2, 2)]),
    "mix_pieces": (lambda i, x, y, r, w: mix_pieces((x, y), x, r, w, 1, i), [X, X, (2, 2), (1, 2)]),
    "ngram_gate": (lambda i, q, k, g, v: ngram_gate(q, k, g, v, 1e-3, impl=i), [X, X, WIDTH, X]),
    "path_attention": (reflected, [(1, 1, 3, 4)] * 4 + [(1, 1, 3)]),
    "rms_norm": (lambda i, x, g: rms_norm(x, g, 1e-3, i), [X, WIDTH]),
    "rms_norm alone": (lambda i, x: rms_norm(x, None, 1e-3, i), [X]),
    "rotate": (lambda i, x: rotate(x, turn(x)), [HEADS]),
    "row_product": (lambda i, x, w: row_product(x, w, i), [X, WIDTH]),
    "silu_gate": (lambda i, x: silu_gate(x, i), [X]),
    "sinkhorn": (lambda i, x: sinkhorn(x, Sinkhorn(2), i), [(2, 2, 3)]),
    "stream_scores": (lambda i, x, y, w: stream_scores((x, y), w, 1e-3, i), [X, X, (2, 4)]),
    "weight_mlp": (lambda i, x, a, b, c: weight_mlp(x, a, b, c, None, 1e-3, "erf", i), [X, (2, 4), (3, 2), (3,)]),
}
"""Every operator with a backward pass of its own, and the shapes of its inputs."""

ALWAYS_RIGHT = {"layer_norm", "layer_norm alone", "linear_scores", "row_product"}
"""They have gradients of gradients in every dtype."""

IN_PYTORCH = {"depth_attention", "depth_read", "depth_read of statistics", "mix", "mix_pieces", "rotate"}
"""They have them in float64, which C kernels do not serve."""

REFUSED = r"^create_graph=True: must be False, since .+ has first gradients alone; (pass|call|run) .+"


def sum_of_sines(made: Tensor | Sequence[Tensor]) -> Tensor:
    """One number of all results."""
    return torch.stack([x.sin().sum() for x in tree_leaves(made)]).sum()


def second_gradients(name: str, dtype: torch.dtype, impl: Impl = "fused") -> list[Tensor]:
    """The gradients of the squared length of an operator's gradients, in float64."""
    function, shapes = BY_OPERATOR[name]
    leaves = [normal(*shape, seed=seed).to(dtype).requires_grad_() for seed, shape in enumerate(shapes)]
    grads = torch.autograd.grad(sum_of_sines(function(impl, *leaves)), leaves, create_graph=True)
    length = torch.stack([grad.square().sum() for grad in grads]).sum()
    return [grad.double() for grad in torch.autograd.grad(length, leaves)]


@pytest.mark.parametrize("name", BY_OPERATOR)
def test_gradients_of_gradients_are_right_or_refused(name: str) -> None:
    function, shapes = BY_OPERATOR[name]
    leaves = [normal(*shape, seed=seed).requires_grad_() for seed, shape in enumerate(shapes)]
    assert gradgradcheck(lambda *given: sum_of_sines(function("reference", *given)), leaves, fast_mode=True)
    want = second_gradients(name, torch.float64, "reference")
    for dtype, budget, right in (
        (torch.float64, 1e-9, name in ALWAYS_RIGHT | IN_PYTORCH),
        (torch.float32, 1e-3, name in ALWAYS_RIGHT),
    ):
        same = partial(torch.testing.assert_close, expected=want, rtol=budget, atol=budget)
        if right:
            same(second_gradients(name, dtype))
            continue
        with pytest.raises(ConfigError, match=REFUSED) as refused:
            second_gradients(name, dtype)
        # What the message advises is tried.
        if "impl='reference'" in str(refused.value):
            same(second_gradients(name, dtype, "reference"))
        if "plain_forms()" in str(refused.value):
            with plain_forms():
                same(second_gradients(name, dtype))


def test_no_backward_pass_is_left_out() -> None:
    names = [found.name for found in pkgutil.walk_packages(ops.__path__, "twoaxis.ops.") if not found.name.endswith("_kernels")]
    defined = [one for name in names for one in vars(importlib.import_module(name)).values() if isinstance(one, type)]
    reached = set[type]()
    for function, shapes in BY_OPERATOR.values():
        for dtype in (torch.float32, torch.float64):
            leaves = [normal(*shape, dtype=dtype).requires_grad_() for shape in shapes]
            reached |= backward_passes(sum_of_sines(function("fused", *leaves)))
    left = {one for one in defined if issubclass(one, torch.autograd.Function)} - reached
    assert {one.__name__ for one in left} == {"_EarlyReads"}, "its kernels are for a GPU alone"
    with pytest.raises(ConfigError, match=r"^create_graph=True: must be False, since early_reads"):
        left.pop().backward(None)


def backward_passes(made: Tensor) -> set[type]:
    """The classes of all that is written by hand in the graph of a tensor."""
    waiting, seen = [made.grad_fn], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [before for before, _ in node.next_functions]
    return {type(node)._forward_cls for node in seen if hasattr(type(node), "_forward_cls")}


def test_a_run_says_whether_they_were_on() -> None:
    assert describe_environment(torch.device("cpu"), torch.float32)["kernels"] == "on"
    with kernels.without_kernels():
        assert describe_environment(torch.device("cpu"), torch.float32)["kernels"] == "off: TWOAXIS_KERNELS=off"


def test_they_are_built_once(tmp_path: Path) -> None:
    assert said(TWOAXIS_CACHE=str(tmp_path)) == "compiles | on | True"
    names = {path.suffix for path in (tmp_path / "kernels").iterdir()}
    (made,) = (tmp_path / "kernels").glob("*.so")
    assert names == {".so", ".lock"}
    before = made.stat().st_mtime_ns
    assert said(TWOAXIS_CACHE=str(tmp_path)) == "has | on | True"
    assert [file.stat().st_mtime_ns for file in (tmp_path / "kernels").glob("*.so")] == [before]


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that makes empty files, and writes down its calls beside itself, for an empty cache folder."""
    monkeypatch.setenv("TWOAXIS_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "cc"
    path.write_text(f"""#!/bin/sh
[ $1 = --version ] && exit 0
echo "$@" >> {tmp_path}/calls
while [ $1 != -o ]; do shift; done
touch $2
""")
    path.chmod(0o755)
    return path


def links(compiler: Path) -> int:
    """How many libraries it has made."""
    return sum("-shared" in call for call in compiler.with_name("calls").read_text().splitlines())


def test_of_two_that_need_them_at_once_one_builds_them(compiler: Path) -> None:
    with ThreadPoolExecutor() as pool:
        one, other = pool.map(library._built, [str(compiler)] * 2)
    assert one == other and one.exists() and links(compiler) == 1


def test_nobody_waits_for_ever_or_fails_for_a_lock(compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "WAIT_SECONDS", 0.1)
    lock = library._path(str(compiler)).with_suffix(".lock")
    lock.parent.mkdir(parents=True)
    with open(lock, "wb") as held:
        assert try_lock(held.fileno()) == "held"
        library._built(str(compiler)).unlink()
    # In place of one that another user may write alone.
    lock.unlink()
    lock.mkdir()
    assert library._built(str(compiler)).exists() and links(compiler) == 2


def test_where_they_cannot_be_built_pytorch_computes_and_says_so(tmp_path: Path) -> None:
    nothing = "has | off: no C compiler is found; install gcc or set CC | False"
    assert said(PATH=str(tmp_path), TWOAXIS_CACHE=str(tmp_path)) == nothing
    fails = tmp_path / "cc"
    fails.write_text("#!/bin/sh\n[ $1 = --version ] && exit 0\necho 'error: no such option' >&2\nexit 1\n")
    fails.chmod(0o755)
    assert said(CC=str(fails), TWOAXIS_CACHE=str(tmp_path)) == f"compiles | off: {fails} fails: error: no such option | False"
    (tmp_path / "file").touch()
    found = said(TWOAXIS_CACHE=str(tmp_path / "file"))
    assert found.startswith("compiles | off: ") and found.endswith(f"'{tmp_path}/file/kernels' | False")
