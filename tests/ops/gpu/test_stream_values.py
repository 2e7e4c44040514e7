"""Mixing of streams in Triton's interpreter against the reference engine in float64: values and all gradients."""

import importlib.util
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.ops.compare import normal
from tests.ops.gpu.interpreted import GRADIENTS, SIXTEEN_BITS, VALUES, error, guarded
from twoaxis.ops.gpu import launch, stream_operator
from twoaxis.ops.precision import Impl
from twoaxis.ops.streams import mix_pieces

pytestmark = pytest.mark.interpret

if importlib.util.find_spec("triton") is None:
    pytest.skip("without triton", allow_module_level=True)


class Case(NamedTuple):
    """A mixing.

    Attributes:
        n: streams.
        D: their width.
        residual: weights between streams, `token`, `static` or `identity`.
        write: weights of the update, `token`, `static` or `none`, which makes it a read.
        dtype: of streams, update and cotangents.
        results: K; 0 is n.
    """

    n: int
    D: int
    residual: str
    write: str
    dtype: torch.dtype = torch.float32
    results: int = 0


CASES = (
    Case(4, 99, "token", "token"),
    Case(2, 48, "static", "static"),
    Case(4, 48, "identity", "token"),
    Case(2, 100, "identity", "static", torch.bfloat16),
    Case(4, 64, "token", "static", torch.bfloat16),
    Case(2, 99, "static", "token", torch.float16),
    Case(4, 1100, "token", "none", results=1),
    Case(4, 99, "static", "none", torch.bfloat16, 1),
    Case(3, 48, "token", "token", torch.bfloat16, 2),
    Case(1, 48, "token", "token"),
)


def tensors(case: Case, shape: tuple[int, int] = (1, 7)) -> list[Tensor]:
    """Weights of streams and of the update where there are some, the update, and the streams."""
    K = case.results or case.n
    residual = normal(case.n, K, *(shape if case.residual == "token" else ()), seed=1).float()
    write = normal(1, K, *(shape if case.write == "token" else ()), seed=2).float()
    streams = [normal(*shape, case.D, seed=4 + k).to(case.dtype) for k in range(case.n)]
    rest = [] if case.write == "none" else [write, normal(*shape, case.D, seed=3).to(case.dtype)]
    return [*([] if case.residual == "identity" else [residual]), *rest, *streams]


def mixed(case: Case, given: Sequence[Tensor], impl: Impl) -> tuple[Tensor, ...]:
    taken = iter(given)
    residual = None if case.residual == "identity" else next(taken)
    write, update = (None, None) if case.write == "none" else (next(taken), next(taken))
    return mix_pieces(tuple(taken), update, residual, write, 1, impl)


def results(case: Case, given: Sequence[Tensor], impl: Impl, wide: bool = False) -> list[Tensor]:
    """The new streams, and the gradients of all that they are made of."""
    leaves = [(one.double() if wide else guarded(one)).requires_grad_() for one in given]
    found = mixed(case, leaves, impl)
    cotangents = [normal(*x.shape, seed=90 + i).to(case.dtype).to(x.dtype) for i, x in enumerate(found)]
    return [*(x.detach() for x in found), *torch.autograd.grad(found, leaves, cotangents)]


def assert_right(case: Case, got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    for index, (ours, exact) in enumerate(zip(got, want, strict=True)):
        allowed = (VALUES if index < (case.results or case.n) else GRADIENTS) + SIXTEEN_BITS[ours.dtype]
        assert error(ours, exact) <= allowed, index


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients(case: Case) -> None:
    given = tensors(case)
    assert_right(case, results(case, given, "fused"), results(case, given, "reference", wide=True))


@pytest.mark.parametrize("residual", ["token", "static"])
@pytest.mark.parametrize("N", [0, 1, 19])
def test_any_number_of_rows(N: int, residual: str) -> None:
    case = Case(2, 48, residual, residual)
    given = tensors(case, (N, 1))
    assert_right(case, results(case, given, "fused"), results(case, given, "reference", wide=True))


def test_programs_share_rows_in_any_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums over rows are taken per program and then over programs, in a fixed order: no bit differs between two runs."""
    for case in (Case(2, 200, "static", "token"), Case(2, 200, "token", "static")):
        given = tensors(case)
        first, again = (results(case, given, "fused") for _ in range(2))
        assert all(map(torch.equal, first, again))
        for programs in (1, 3, 264):
            blocks = launch.Blocks(2, 1, 4, 1, programs, columns=128)
            with monkeypatch.context() as patched:
                patched.setattr(launch, "mix_backward_blocks", lambda width, blocks=blocks: blocks)
                for ours, exact in zip(results(case, given, "fused"), first, strict=True):
                    assert error(ours, exact.double()) <= 1e-6


def test_tensors_that_do_not_lie_in_rows_and_differ_in_type() -> None:
    """Transposed, sliced and expanded tensors, and an update in bfloat16; the gradient is of a plain sum."""
    wide = normal(7, 2, 96).float()
    streams = [wide[..., :48].transpose(0, 1), wide[..., 48:].transpose(0, 1), normal(48, seed=2).float().expand(2, 7, 48)]
    update = normal(48, 7, 2, seed=3).bfloat16().permute(2, 1, 0)
    residual, write = normal(2, 7, 3, 3, seed=4).float().permute(3, 2, 0, 1), normal(3, 1, seed=5).float().T
    found = []
    engines: tuple[tuple[Impl, bool], ...] = (("fused", False), ("reference", True))
    for impl, is_wide in engines:
        leaves = [(x.double() if is_wide else x).detach().requires_grad_() for x in (residual, write, update, *streams)]
        new = mix_pieces(leaves[3:], leaves[2], leaves[0], leaves[1], 1, impl)
        total: Any = sum(x.sum() for x in new)
        found.append([*(x.detach() for x in new), *torch.autograd.grad(total, leaves)])
    assert_right(Case(3, 48, "token", "static"), found[0], found[1])


@pytest.mark.parametrize("asked", [[0], [1], [2], [3, 4], [1, 2, 4]], ids=str)
def test_only_the_gradients_that_are_asked_for(asked: list[int]) -> None:
    case = Case(2, 48, "token", "static")
    given = tensors(case)
    want = results(case, given, "reference", wide=True)[case.n :]
    leaves = [one.clone().requires_grad_(index in asked) for index, one in enumerate(given)]
    found = mixed(case, leaves, "fused")
    cotangents = [normal(*x.shape, seed=90 + i).float() for i, x in enumerate(found)]
    got = torch.autograd.grad(found, [leaves[index] for index in asked], cotangents)
    with torch.no_grad():
        assert all(map(torch.equal, mixed(case, given, "fused"), found))
    assert [error(ours, want[index]) <= GRADIENTS for ours, index in zip(got, asked, strict=True)] == [True] * len(asked)


def test_what_kernels_cannot_hold_runs_in_the_torch_engine() -> None:
    residual, write, update, *streams = tensors(Case(4, 48, "token", "token"))
    assert stream_operator.serves(streams, update, residual, write, 1)
    assert stream_operator.serves(streams, update, None, write, 1)
    assert not stream_operator.serves(streams, update, residual, write, 2)
    assert not stream_operator.serves(streams, update.double(), residual, write, 1)
    assert not stream_operator.serves(streams, update, residual[..., :1], write, 1)
    residual, write, update, *streams = tensors(Case(5, 48, "token", "token"))
    assert not stream_operator.serves(streams, update, residual, write, 1)
    many, *streams = tensors(Case(11, 48, "static", "none", results=1))
    assert not stream_operator.serves(streams, None, many, None, 1)
    assert stream_operator.serves(streams[1:], None, many[1:], None, 1)


def test_it_is_one_graph_and_the_operators_keep_what_torch_asks_of_them() -> None:
    case = Case(2, 48, "token", "static")
    residual, write, update, *streams = given = tensors(case, (1, 3))
    torch.library.opcheck(torch.ops.twoaxis.mix_streams.default, (streams, update, residual, write))
    backward = streams, streams, update, residual, write, True, True
    torch.library.opcheck(torch.ops.twoaxis.mix_streams_backward.default, backward)

    def step(*leaves: Tensor) -> Tensor:
        return torch.stack(mixed(case, leaves, "fused"))

    found = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        leaves = [one.clone().requires_grad_() for one in given]
        new = function(*leaves)
        found.append([new, *torch.autograd.grad(new.square().sum(), leaves)])
    assert all(map(torch.equal, *found))
