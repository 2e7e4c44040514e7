"""The depth read in Triton's interpreter against the reference engine in float64: values, and the gradient of every argument.

The interpreter truncates where a GPU rounds to 16 bits, so errors of 16-bit results are up to a whole unit here.
"""

import importlib.util
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.ops.compare import normal
from tests.ops.gpu.interpreted import GRADIENTS, VALUES, GivenGradients, assert_close, error, guarded
from twoaxis.ops import kernels
from twoaxis.ops.depth_read import Values, depth_read, passing_factor, passing_read, source_factor
from twoaxis.ops.gpu import depth_read_operator, launch
from twoaxis.ops.norm import inverse_rms
from twoaxis.ops.precision import Impl

pytestmark = pytest.mark.interpret

if importlib.util.find_spec("triton") is None:
    pytest.skip("without triton", allow_module_level=True)

EPS = 1e-6


class Case(NamedTuple):
    """One form of the read.

    Attributes:
        n: sources.
        D: their width.
        n_heads: H.
        dtype: of sources, stream and cotangent.
        query: one for all tokens, or one for each.
        factors: with a gradient of their own, or statistics.
        stream: whether one is added to.
        scale: whether one is given.
        values: as of `depth_read`.
    """

    n: int
    D: int
    n_heads: int = 1
    dtype: torch.dtype = torch.float32
    query: str = "static"
    factors: str = "own"
    stream: bool = False
    scale: bool = False
    values: Values = "raw"


CASES = (
    Case(2, 100, stream=True, scale=True),
    Case(2, 48, 2, torch.bfloat16, "token", "statistic", stream=True),
    Case(5, 99, 3, torch.bfloat16, scale=True),
    Case(3, 64, 4, torch.float16, "token", stream=True, scale=True),
    Case(9, 100, dtype=torch.bfloat16, factors="statistic"),
    Case(9, 48, 1, query="token", factors="statistic", scale=True),
    Case(1, 48, 2, torch.bfloat16, values="normalised"),
    Case(5, 60, 3, factors="statistic", stream=True, scale=True, values="normalised"),
    Case(3, 2100, factors="statistic", dtype=torch.float16),
)


def tensors(case: Case, N: int = 7) -> list[Tensor]:
    """Query, stream, scale and sources: every second source is 100 times as large, and one of many is zero."""
    shape = 1, N, case.D
    # Scores of the order of one, so that several sources have weight.
    query = normal(*(shape if case.query == "token" else shape[2:]), seed=77) / case.D**0.5
    sources = [normal(*shape, seed=i) * 100.0 ** (i % 2) * (i != 4) for i in range(case.n)]
    rounded = [v.to(case.dtype) for v in (normal(*shape, seed=8), *sources)]
    return [query.float(), rounded[0], torch.tensor([0.7]), *rounded[1:]]


def read(case: Case, given: Sequence[Tensor], impl: Impl) -> Tensor:
    query, stream, scale, *sources = given
    own = case.factors == "own"
    factors = [source_factor(v, EPS, "reference") if own else inverse_rms(v, EPS) for v in sources]
    chosen: dict[str, Any] = {"stream": stream if case.stream else None, "scale": scale if case.scale else None}
    return depth_read(sources, factors, query, impl, n_heads=case.n_heads, values=case.values, **chosen)


def results(case: Case, given: Sequence[Tensor], impl: Impl, wide: bool = False) -> list[Tensor]:
    """The read and the gradients of all that it takes."""
    leaves = [(one.double() if wide else guarded(one)).requires_grad_() for one in given]
    mixed = read(case, leaves, impl)
    used = [leaves[0], *([leaves[1]] if case.stream else []), *([leaves[2]] if case.scale else []), *leaves[3:]]
    return [mixed.detach(), *torch.autograd.grad(mixed, used, normal(*mixed.shape, seed=99).to(given[1].dtype).to(mixed.dtype))]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients(case: Case) -> None:
    given = tensors(case)
    assert_close(results(case, given, "fused"), results(case, given, "reference", wide=True), case.dtype)


@pytest.mark.parametrize("N", [0, 1, 19])
def test_any_number_of_rows(N: int) -> None:
    """No row, one, and more than a program has at a time."""
    case = Case(3, 48, scale=True)
    given = tensors(case, N)
    assert_close(results(case, given, "fused"), results(case, given, "reference", wide=True), case.dtype)


def test_programs_share_rows_in_any_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums over rows are taken per program and then over programs, in a fixed order: no bit differs between two runs."""
    case = Case(3, 48, scale=True)
    given = tensors(case, 7)
    first, again = (results(case, given, "fused") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    for programs in (1, 3, 264):
        monkeypatch.setattr(launch, "read_backward_blocks", lambda *shape, most=programs: launch.Blocks(1, 2, 4, 2, most))
        for ours, exact in zip(results(case, given, "fused"), first, strict=True):
            assert error(ours, exact.double()) <= 1e-6


def test_tensors_that_do_not_lie_in_rows() -> None:
    """Transposed, sliced and expanded tensors are read as what they are, and so is the gradient of a plain sum."""
    wide = normal(7, 2, 96, dtype=torch.float32)
    sources = [wide[..., :48].transpose(0, 1), wide[..., 48:].transpose(0, 1), normal(48, dtype=torch.float32).expand(2, 7, 48)]
    query = (normal(96, seed=5, dtype=torch.float32) / 7)[::2]
    found = []
    engines: tuple[tuple[Impl, torch.dtype], ...] = (("fused", torch.float32), ("reference", torch.float64))
    for impl, dtype in engines:
        leaves = [one.to(dtype).detach().requires_grad_() for one in (query, *sources)]
        query_, *sources_ = leaves
        mixed = depth_read(sources_, [inverse_rms(v, EPS) for v in sources_], query_, impl)
        found.append([mixed.detach(), *torch.autograd.grad(mixed.sum(), leaves)])
    assert_close(found[0], found[1], torch.float32)


def test_gradients_of_query_and_scale_are_not_those_of_a_rounded_mixture() -> None:
    """In bfloat16 a saved mixture would cost them their precision where the weights are peaked."""
    case = Case(9, 96, dtype=torch.bfloat16, scale=True)
    query, *others = tensors(case)
    given = [30 * query, *others]
    got, want = results(case, given, "fused"), results(case, given, "reference", wide=True)
    assert error(got[1], want[1]) <= GRADIENTS and error(got[2], want[2]) <= GRADIENTS


def test_only_the_gradients_that_are_asked_for_are_written() -> None:
    case = Case(5, 48)
    query, stream, scale, *sources = tensors(case)
    want = results(case, [query, stream, scale, *sources], "reference", wide=True)
    cotangent = normal(1, 7, 48, seed=99, dtype=torch.float32)
    leaves = [v.requires_grad_(index in (1, 4)) for index, v in enumerate(sources)]
    factors = [source_factor(v, EPS, "reference") for v in leaves]
    got = torch.autograd.grad(depth_read(leaves, factors, query), [leaves[1], leaves[4]], cotangent)
    assert [error(ours, want[2 + index]) <= GRADIENTS for ours, index in zip(got, (1, 4), strict=True)] == [True, True]
    with torch.no_grad():
        assert error(depth_read(leaves, factors, query), want[0]) <= VALUES


# Dynamo looks at the gradient of every tensor that it is given.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(("factors", "traced"), [("own", False), ("statistic", False), ("own", True)])
def test_gradients_of_earlier_readers_pass_through(factors: str, traced: bool) -> None:
    """Three readers of ever more sources: the gradients of the later ones meet in the buffers of the earlier.

    Traced, each reader is a graph of its own, as it is where blocks are compiled.
    """
    read_on: Any = torch.compile(passing_read, fullgraph=True, backend="aot_eager") if traced else passing_read
    tensor, queries = [normal(1, 7, 48, seed=i) for i in range(4)], [normal(48, seed=50 + i) / 7 for i in range(3)]

    def readers(given: Sequence[Tensor], impl: Impl) -> Tensor:
        vs, qs, total = given[:4], given[4:], torch.zeros((), dtype=given[0].dtype)
        taken = list(vs[:2])
        for query, newest in zip(qs, (*vs[2:], None), strict=True):
            chosen = [source_factor(v, EPS, "reference") if factors == "own" else inverse_rms(v, EPS) for v in taken]
            mixed, taken = read_on(taken, chosen, query, impl)
            total = total + mixed.sin()
            taken = [*taken, *([] if newest is None else [newest * mixed])]
        return total

    leaves = [one.float().requires_grad_() for one in (*tensor, *queries)]
    wide = [one.double().detach().requires_grad_() for one in leaves]
    got, want = readers(leaves, "fused"), readers(wide, "reference")
    cotangent = normal(1, 7, 48, seed=99, dtype=torch.float32)
    with GivenGradients() as seen:
        pairs = torch.autograd.grad(got, leaves, cotangent), torch.autograd.grad(want, wide, cotangent.double())
    assert_close([got.detach(), *pairs[0]], [want.detach(), *pairs[1]], torch.float32)
    # From the last reader to the first: the sources whose gradients came with the call; a traced one gets zeros.
    assert seen.given == [0b1111 if traced else 0, 0b111, 0b11]


def test_scores_out_of_range_and_values_that_are_no_numbers() -> None:
    """Scores of +-1000 neither overflow nor vanish; a NaN reaches the output of its row and no other."""
    case = Case(3, 48)
    query, _, _, *sources = tensors(case)
    ones = [torch.full_like(v, float(i)) for i, v in enumerate(sources)]
    mixed = depth_read(ones, [torch.full((1, 7), factor) for factor in (-1000.0, 0.0, 1000.0)], torch.ones(48))
    assert torch.equal(mixed, ones[2])
    sources[1][0, 3, 5] = float("nan")
    mixed = depth_read(sources, [torch.ones(1, 7)] * 3, query)
    assert mixed[0].isnan().all(-1).tolist() == [row == 3 for row in range(7)]


def test_what_kernels_cannot_hold_runs_in_the_torch_engine() -> None:
    many, wide = [torch.ones(1, 1, 4)] * 64, [torch.ones(1, 1, 8200)] * 2
    assert not depth_read_operator.serves(many, 1) and not depth_read_operator.serves(wide, 1)
    assert not depth_read_operator.serves([torch.ones(1, 1, 4, dtype=torch.float64)] * 2, 1)
    assert depth_read_operator.serves(many[:63], 1) and depth_read_operator.serves([wide[0][..., :8192]], 1)
    torch.testing.assert_close(depth_read(many, [torch.ones(1, 1)] * 64, torch.ones(4)), many[0])


def test_the_operators_keep_what_torch_asks_of_them() -> None:
    case = Case(3, 48, 2, scale=True)
    query, stream, scale, *sources = tensors(case, 3)
    factors = torch.ones(3, 1, 3)
    given = query, sources, factors, [], stream, scale, 2, False
    torch.library.opcheck(torch.ops.twoaxis.depth_read.default, given)
    _, scores, log_totals = torch.ops.twoaxis.depth_read(*given)
    saved = stream, query, sources, factors, [], scale, scores, log_totals, sources[:1], 0b010, 0b110, True, False, 2
    torch.library.opcheck(torch.ops.twoaxis.depth_read_backward.default, saved)


def test_it_is_one_graph_for_any_backend() -> None:
    """No break, forward and backward, with both operators in it; switched off, the plain form is traced."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    case = Case(3, 48, 2, torch.bfloat16, stream=True)
    given, seen = tensors(case, 3), []

    def look(graph: Any, inputs: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes if "twoaxis" in str(node.target))
        return make_boxed_func(graph)

    def step(*leaves: Tensor) -> Tensor:
        return read(case, leaves, "fused")

    traced = torch.compile(step, fullgraph=True, backend=aot_autograd(fw_compiler=look, bw_compiler=look))
    found = []
    for function in (step, traced):
        leaves = [one.clone().requires_grad_() for one in given]
        mixed = function(*leaves)
        found.append([mixed, *torch.autograd.grad(mixed.float().square().sum(), [leaves[0], leaves[1], *leaves[3:]])])
    for eager, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, eager)
    assert seen == ["twoaxis.depth_read.default", "twoaxis.depth_read_backward.default"]
    with kernels.without_kernels():
        traced(*given)
    assert len(seen) == 2


def test_autocast_and_checkpoints_change_nothing() -> None:
    from torch.utils.checkpoint import checkpoint

    case = Case(3, 48, dtype=torch.bfloat16)
    given = tensors(case, 3)
    plain = results(case, given, "fused")
    with torch.autocast("cpu", torch.bfloat16):
        cast = results(case, given, "fused")
    leaves = [one.clone().requires_grad_() for one in given]
    again: Any = checkpoint(lambda *leaves: read(case, leaves, "fused"), *leaves, use_reentrant=False)
    cotangent = normal(*again.shape, seed=99, dtype=torch.bfloat16)
    kept = [again, *torch.autograd.grad(again, [leaves[0], *leaves[3:]], cotangent)]
    for one, other, third in zip(plain, cast, kept, strict=True):
        assert torch.equal(one, other) and torch.equal(one, third)


@pytest.mark.parametrize(("N", "D", "dtype"), [(19, 100, torch.float32), (3, 48, torch.bfloat16), (0, 48, torch.float32)])
def test_inverse_rms_of_a_source_that_is_passed_on(N: int, D: int, dtype: torch.dtype) -> None:
    """The gradient through the factor and that of the readers come back as one; each also comes back alone."""
    given = (normal(1, N, D) * 3).to(dtype)
    cotangents = normal(1, N, seed=1, dtype=torch.float32), normal(1, N, D, seed=2).to(dtype)
    for chosen in ((0, 1), (0,), (1,)):
        v, wide = guarded(given).requires_grad_(), given.double().requires_grad_()
        pair, exact = passing_factor(v, EPS), (source_factor(wide, EPS, "reference"), wide)
        (got,) = torch.autograd.grad([pair[i] for i in chosen], v, [cotangents[i] for i in chosen])
        (want,) = torch.autograd.grad([exact[i] * 1 for i in chosen], wide, [cotangents[i].double() for i in chosen])
        assert_close([pair[0].detach().float(), got], [exact[0].detach(), want], torch.float32)
    (alone,) = torch.autograd.grad(source_factor(v, EPS), v, cotangents[0])
    (want,) = torch.autograd.grad(exact[0], wide, cotangents[0].double())
    assert_close([pair[0].detach(), alone], [exact[0].detach(), want], torch.float32)
    torch.library.opcheck(torch.ops.twoaxis.inverse_rms.default, (v.detach(), EPS))
    saved = v.detach(), pair[0].detach(), cotangents[0], cotangents[1]
    torch.library.opcheck(torch.ops.twoaxis.inverse_rms_backward.default, saved)
