"""Sinkhorn normalisation in Triton's interpreter against the reference engine in float64: values and gradients."""

import importlib.util
import itertools

import pytest
import torch
from torch import Tensor

from tests.ops.compare import normal
from tests.ops.gpu.interpreted import GRADIENTS, SIXTEEN_BITS, VALUES, error, guarded
from twoaxis.ops.gpu import sinkhorn_operator
from twoaxis.ops.precision import Impl
from twoaxis.ops.sinkhorn import Order, Sinkhorn, Start, sinkhorn

pytestmark = pytest.mark.interpret

if importlib.util.find_spec("triton") is None:
    pytest.skip("without triton", allow_module_level=True)

STARTS: tuple[Start, ...] = ("exp", "exp_minus_max", "softmax")
ORDERS: tuple[Order, ...] = ("sources_first", "destinations_first")
OPTIONS = [
    Sinkhorn(rounds, order, start, eps, 2 * eps)
    for (rounds, eps), order, start in itertools.product(((1, 0.0), (2, 1e-2)), ORDERS, STARTS)
]


def results(logits: Tensor, options: Sinkhorn, impl: Impl, wide: bool = False) -> list[Tensor]:
    """The matrices and the gradient of the logits."""
    leaf = (logits.double() if wide else guarded(logits)).requires_grad_()
    matrix = sinkhorn(leaf, options, impl)
    cotangent = normal(*matrix.shape, seed=9).float().to(matrix.dtype)
    return [matrix.detach(), *torch.autograd.grad(matrix, [leaf], cotangent)]


def assert_right(got: list[Tensor], want: list[Tensor]) -> None:
    assert got[0].dtype == torch.float32
    assert error(got[0], want[0]) <= VALUES
    assert error(got[1], want[1]) <= GRADIENTS + SIXTEEN_BITS[got[1].dtype]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_values_and_gradients(options: Sinkhorn) -> None:
    """Two of the largest entries are equal."""
    logits = normal(3, 3, 1, 7).float()
    logits[:2, :2, 0, 4] = 5
    assert_right(results(logits, options, "fused"), results(logits, options, "reference", wide=True))


@pytest.mark.parametrize(
    ("n", "dtype", "options"),
    [
        (4, torch.float32, Sinkhorn(20)),
        (4, torch.bfloat16, Sinkhorn(2, start="softmax")),
        (2, torch.float16, Sinkhorn(4, start="exp_minus_max")),
    ],
    ids=str,
)
def test_sizes_types_and_published_rounds(n: int, dtype: torch.dtype, options: Sinkhorn) -> None:
    logits = 3 * normal(n, n, 2, 3).to(dtype)
    assert_right(results(logits, options, "fused"), results(logits, options, "reference", wide=True))


@pytest.mark.parametrize("each", [(), (0,), (1,), (2, 35)], ids=str)
def test_any_number_of_matrices(each: tuple[int, ...]) -> None:
    """One without an axis of tokens, none, one, and more than a program has."""
    logits, options = normal(2, 2, *each).float(), Sinkhorn(2)
    assert_right(results(logits, options, "fused"), results(logits, options, "reference", wide=True))


def test_tokens_that_do_not_come_last_in_memory() -> None:
    found = []
    engines: tuple[tuple[Impl, torch.dtype], ...] = (("fused", torch.float32), ("reference", torch.float64))
    for impl, dtype in engines:
        leaf = normal(7, 2, 4, 4).float().to(dtype).permute(2, 3, 0, 1).requires_grad_()
        matrix = sinkhorn(leaf, Sinkhorn(3), impl)
        weights = normal(7, 2, 4, 4, seed=1).float().to(dtype).permute(2, 3, 0, 1)
        found.append([matrix.detach(), *torch.autograd.grad(matrix, [leaf], weights)])
    assert_right(found[0], found[1])


def test_large_logits_and_a_value_that_is_no_number() -> None:
    """With the maximum taken off, logits of +-200 neither overflow nor vanish; a NaN stays in its matrix."""
    logits = 100 * normal(4, 4, 7).float().clamp(-2, 2)
    logits[1, 2, 3] = float("nan")
    for start in STARTS[1:]:
        options = Sinkhorn(2, start=start, start_eps=1e-6)
        got, want = results(logits, options, "fused"), results(logits, options, "reference", wide=True)
        whole = [0, 1, 2, 4, 5, 6]
        assert got[0][..., whole].isfinite().all() and got[0][..., 3].isnan().any()
        assert_right([one[..., whole] for one in got], [one[..., whole] for one in want])


def test_what_kernels_cannot_hold_runs_in_the_torch_engine() -> None:
    assert sinkhorn_operator.serves(torch.zeros(4, 4, 1), "exp")
    assert not sinkhorn_operator.serves(torch.zeros(5, 5, 1), "exp")
    assert not sinkhorn_operator.serves(torch.zeros(4, 4, 1), "log")
    assert not sinkhorn_operator.serves(torch.zeros(4, 4, 1).double(), "exp")


def test_it_is_one_graph_and_the_operators_keep_what_torch_asks_of_them() -> None:
    logits, options = normal(2, 2, 3).float(), (2, 1, "exp", 0.0, 1e-6)
    torch.library.opcheck(torch.ops.twoaxis.sinkhorn.default, (logits, *options))
    torch.library.opcheck(torch.ops.twoaxis.sinkhorn_backward.default, (logits, logits, *options))
    found = []
    traced = torch.compile(lambda x: sinkhorn(x, Sinkhorn(2)), fullgraph=True, backend="aot_eager")
    for function in (lambda x: sinkhorn(x, Sinkhorn(2)), traced):
        leaf = logits.clone().requires_grad_()
        matrix = function(leaf)
        found.append([matrix, *torch.autograd.grad(matrix.square().sum(), [leaf])])
    assert all(map(torch.equal, *found))
    with torch.no_grad():
        assert torch.equal(sinkhorn(logits, Sinkhorn(2)), found[0][0])
