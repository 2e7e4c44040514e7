"""Checks, their tolerances and their error, and the functions that run them on a table of mixers."""

import inspect
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from twoaxis.core.measure import distance
from twoaxis.core.registry import Row
from twoaxis.testing.toy import AxisConfig


@dataclass(frozen=True)
class Budget:
    """One tolerance, and the reason for its size."""

    bound: float
    why: str


BUDGETS: dict[str, Budget] = {
    "same_values": Budget(1e-11, "float64, other order of sums: about 1e-15 per operation over a few hundred of them"),
    "same_gradients": Budget(1e-10, "as same_values, through the backward pass of three layers"),
    "engines": Budget(2e-12, "fused against reference in float64, one mixer: about 1e-15 per operation"),
    "engine_gradients": Budget(1e-11, "as engines, relative to the largest gradient"),
    "init_exact": Budget(1e-12, "the same float64 logits up to rounding; toy logits are below 1"),
    "same_draws": Budget(1e-6, "initial values in float32, rounded once more where a depth mixer scales them"),
    "init_up_to_norm": Budget(1e-10, "norm eps 1e-20 against mean squares above 1e-6 leaves rounding only"),
    "init_none": Budget(1e-4, "what is denied must differ by far more than rounding; toy logits are about 0.1"),
    "visible_change": Budget(1e-9, "a disturbance of size 1 that arrives is far above float64 rounding"),
    "position_offset": Budget(1e-9, "angles of positions near 1000 are rounded at 1e-13 and sit in a softmax"),
    "gradcheck_absolute": Budget(1e-6, "central differences with step 1e-6 in float64 are good to about 1e-9"),
    "gradcheck_relative": Budget(1e-5, "as above, for large entries"),
    "low_precision_ratio": Budget(
        3.0, "root mean square error over that of rounding the float64 result once; four independent roundings give 2"
    ),
}


def bound(name: str) -> float:
    """The bound of this name."""
    return BUDGETS[name].bound


class CheckFailed(AssertionError):
    """A false claim of a mixer; one line with the measured number and its bound."""


@dataclass(frozen=True)
class Fault:
    """One planted fault, and the checks that must find it.

    Attributes:
        name: what is wrong.
        faulty: the wrong configuration.
        twin: the same without the fault.
        caught_by: checks that fail on the wrong one and pass on the twin.
        raises: their error, another one than CheckFailed if the model cannot run.
    """

    name: str
    faulty: AxisConfig
    twin: AxisConfig
    caught_by: tuple[str, ...]
    raises: type[Exception] = CheckFailed


@dataclass(frozen=True)
class Check:
    """One claim that must hold for every mixer of an axis.

    Attributes:
        name: the claim in snake_case.
        meaning: the claim in one sentence.
        run: takes an example configuration; raises CheckFailed when the claim does not hold.
        slow: whether it takes more than a second or two.
    """

    name: str
    meaning: str
    run: Callable[[Any], None]
    slow: bool = False


@dataclass(frozen=True)
class CheckResult:
    """The result of one check on one example of one row; `ok` is None if it was not run, with the reason as message."""

    kind: str
    example: str
    name: str
    ok: bool | None
    message: str
    seconds: float


def check(function: Callable[[Any], None]) -> Check:
    """Makes a check from a function: its name, and the first line of its docstring as the meaning."""
    return Check(function.__name__, _first_line(function), function)


def slow_check(function: Callable[[Any], None]) -> Check:
    """Makes a check that a quick run skips."""
    return Check(function.__name__, _first_line(function), function, slow=True)


def iterate_checks(rows: Iterable[Row[Any]], checks: Iterable[Check], slow: bool = True) -> Iterator[CheckResult]:
    """Runs every check on every example of every row and yields each result as it is known.

    Args:
        rows: a table, or some of its rows.
        checks: for example `depth_checks()`.
        slow: whether to run the slow ones too; they take the first example of each row only.
    """
    checks = tuple(checks)
    for row in rows:
        for index, example in enumerate(row.examples):
            for one in checks:
                if not one.slow or (slow and index == 0):
                    yield _run(row, example, one)


def run_checks(rows: Iterable[Row[Any]], checks: Iterable[Check], slow: bool = True) -> list[CheckResult]:
    """As `iterate_checks`, all at once.

    Example:
        >>> from twoaxis.depth import DEPTH
        >>> from twoaxis.testing import depth_checks, run_checks
        >>> results = run_checks([DEPTH["residual"]], depth_checks()[:3])
        >>> [result.ok for result in results]
        [True, True, True]
    """
    return list(iterate_checks(rows, checks, slow))


def _run(row: Row[Any], example: str, one: Check) -> CheckResult:
    start = time.perf_counter()
    try:
        one.run(row.example(example))
        message = ""
    except CheckFailed as failure:
        message = str(failure)
    except Exception as error:
        # A mixer that cannot run fails the check; the other checks still run.
        message = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return CheckResult(row.kind, example, one.name, not message, message, time.perf_counter() - start)


def _first_line(function: Callable[..., Any]) -> str:
    return (inspect.getdoc(function) or "").partition("\n")[0]


def require(holds: bool, message: str) -> None:
    """Fails with this message unless the condition holds."""
    if not holds:
        raise CheckFailed(message)


def exactly(what: str, measured: object, expected: object) -> None:
    """Fails unless a measured quantity equals the declared one."""
    require(measured == expected, f"{what}: measured {measured}, must be {expected}")


def identical(what: str, got: Tensor, expected: Tensor) -> None:
    """Fails unless two tensors are equal bit for bit."""
    same_kind(what, got, expected)
    require(torch.equal(got, expected), f"{what}: differs by {distance(got, expected):.1e}, bound 0")


def close(what: str, got: Tensor, expected: Tensor, budget: str) -> None:
    """Fails unless two tensors agree within a budget, relative to their largest entry where that is above 1."""
    same_kind(what, got, expected)
    scale = max(1.0, float(expected.detach().abs().max())) if expected.numel() else 1.0
    error = distance(got, expected) / scale
    require(error <= bound(budget), f"{what}: differs by {error:.1e}, bound {bound(budget):.0e}")


def differs(what: str, got: Tensor, other: Tensor, budget: str = "visible_change") -> None:
    """Fails unless two tensors differ by at least a budget."""
    change = distance(got, other)
    require(change >= bound(budget), f"{what}: changes by {change:.1e}, must be at least {bound(budget):.0e}")


def same_kind(what: str, got: Tensor, expected: Tensor) -> None:
    """Fails unless two tensors have one shape and one dtype."""
    exactly(f"{what}: shape", tuple(got.shape), tuple(expected.shape))
    exactly(f"{what}: dtype", got.dtype, expected.dtype)
