"""The delta write in Triton's interpreter against the reference engine in float64: values and all gradients."""

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.compare import normal
from tests.ops.gpu.interpreted import GRADIENTS, SIXTEEN_BITS, VALUES, error, guarded
from twoaxis.ops.delta import UpdateRule, delta_writes
from twoaxis.ops.gpu import delta_operator
from twoaxis.ops.precision import Impl

pytestmark = pytest.mark.interpret

if importlib.util.find_spec("triton") is None:
    pytest.skip("without triton", allow_module_level=True)

EPS = 1e-2


def tensors(C: int, D: int, dtype: torch.dtype, shape: tuple[int, ...] = (1, 7)) -> list[Tensor]:
    """Direction, targets, beta and channels; one row has no direction."""
    direction = normal(*shape, D, seed=1)
    direction.view(-1, D)[2:3] = 0
    small = [normal(C, *shape, seed=2).float(), normal(*shape, seed=3).float()]
    return [direction.to(dtype), *small, *(normal(*shape, D, seed=10 + c).to(dtype) for c in range(C))]


def write(given: Sequence[Tensor], rule: UpdateRule, impl: Impl) -> tuple[Tensor, ...]:
    direction, targets, beta, *channels = given
    return delta_writes(channels, direction, targets, beta, EPS, rule, impl)


def results(given: Sequence[Tensor], rule: UpdateRule, impl: Impl, wide: bool = False) -> list[Tensor]:
    """The channels that are written, and the gradients of all that the write takes."""
    leaves = [(one.double() if wide else guarded(one)).requires_grad_() for one in given]
    written = write(leaves, rule, impl)
    cotangents = [normal(*x.shape, seed=90 + c).to(given[0].dtype).to(x.dtype) for c, x in enumerate(written)]
    return [*(x.detach() for x in written), *torch.autograd.grad(written, leaves, cotangents)]


def assert_right(got: Sequence[Tensor], want: Sequence[Tensor], n_values: int) -> None:
    for index, (ours, exact) in enumerate(zip(got, want, strict=True)):
        allowed = (VALUES if index < n_values else GRADIENTS) + SIXTEEN_BITS[ours.dtype]
        assert error(ours, exact) <= allowed, index


@pytest.mark.parametrize("rule", ["delta", "write_only"])
@pytest.mark.parametrize(
    ("C", "D", "dtype"),
    [
        (1, 99, torch.float32),
        (4, 48, torch.float32),
        (1, 100, torch.bfloat16),
        (4, 99, torch.bfloat16),
        (3, 64, torch.float16),
        (2, 2100, torch.float32),
    ],
    ids=str,
)
def test_values_and_gradients(C: int, D: int, dtype: torch.dtype, rule: UpdateRule) -> None:
    given = tensors(C, D, dtype)
    assert_right(results(given, rule, "fused"), results(given, rule, "reference", wide=True), C)


@pytest.mark.parametrize("N", [0, 1, 19])
def test_any_number_of_rows(N: int) -> None:
    given = tensors(2, 48, torch.float32, (N, 1))
    assert_right(results(given, "delta", "fused"), results(given, "delta", "reference", wide=True), 2)


def test_tensors_that_do_not_lie_in_rows_and_differ_in_type() -> None:
    """Channels in float32 with a direction in bfloat16, transposed, sliced and expanded; the gradient is of a plain sum."""
    wide = normal(7, 2, 96).float()
    channels = [wide[..., :48].transpose(0, 1), normal(48, seed=2).float().expand(2, 7, 48)]
    direction = wide[..., 48:].transpose(0, 1).bfloat16()
    small = [normal(7, 2, 2, seed=4).float().permute(2, 1, 0), normal(7, 2, seed=5).float().T]
    found = []
    engines: tuple[tuple[Impl, Callable[[Tensor], Tensor]], ...] = (("fused", lambda x: x), ("reference", Tensor.double))
    for impl, made in engines:
        leaves = [made(one).detach().requires_grad_() for one in (direction, *small, *channels)]
        written = write(leaves, "delta", impl)
        total: Any = sum(x.sum() for x in written)
        found.append([*(x.detach() for x in written), *torch.autograd.grad(total, leaves)])
    assert_right(found[0], found[1], 2)


def test_only_the_gradients_that_are_asked_for_and_a_channel_that_nobody_reads() -> None:
    given = tensors(2, 48, torch.float32)
    beta, first = given[2].requires_grad_(), given[3].requires_grad_()
    written = delta_writes([first, given[4]], given[0], given[1], beta, EPS)
    got = torch.autograd.grad(written[0].square().sum(), [beta, first])
    wide = [one.detach().double().requires_grad_() for one in given]
    exact = write(wide, "delta", "reference")
    want = torch.autograd.grad(exact[0].square().sum(), [wide[2], wide[3]])
    assert all(error(a, b) <= GRADIENTS for a, b in zip(got, want, strict=True))
    with torch.no_grad():
        assert all(map(torch.equal, write([*given[:2], beta, first, given[4]], "delta", "fused"), written))


def test_a_value_that_is_no_number_stays_in_its_row() -> None:
    direction, targets, beta, *channels = tensors(2, 48, torch.float32)
    channels[1][0, 3, 5] = float("nan")
    one, other = delta_writes(channels, direction, targets, beta, EPS)
    assert not one.isnan().any() and other[0].isnan().any(-1).tolist() == [row == 3 for row in range(7)]


def test_what_kernels_cannot_hold_runs_in_the_torch_engine() -> None:
    direction, targets, beta, *channels = tensors(2, 48, torch.float32)
    assert delta_operator.serves(channels, direction, targets, beta)
    assert not delta_operator.serves(channels, direction.double(), targets, beta)
    assert not delta_operator.serves(channels, direction, targets, beta[:, :1])
    assert not delta_operator.serves(channels * 3, direction, targets.repeat(3, 1, 1), beta)
    assert not delta_operator.serves([torch.ones(1, 8200)], torch.ones(1, 8200), torch.ones(1, 1), torch.ones(1))


def test_it_is_one_graph_and_the_operators_keep_what_torch_asks_of_them() -> None:
    direction, targets, beta, *channels = tensors(2, 48, torch.float32, (3,))
    given = direction, targets, beta, EPS, True
    torch.library.opcheck(torch.ops.twoaxis.delta_write.default, (channels, *given))
    torch.library.opcheck(torch.ops.twoaxis.delta_write_backward.default, (channels, channels, *given))

    def step(*leaves: Tensor) -> Tensor:
        return torch.stack(write(leaves, "delta", "fused"))

    found = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        leaves = [one.clone().requires_grad_() for one in (direction, targets, beta, *channels)]
        written = function(*leaves)
        found.append([written, *torch.autograd.grad(written.square().sum(), leaves)])
    assert all(map(torch.equal, *found))
