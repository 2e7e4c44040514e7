"""What parameters start at: a changed start fails here and names the parameter, also where no equivalence is declared."""

from typing import Any

import pytest

from twoaxis.core.parameters import Constant
from twoaxis.depth import value_residual

from .cases import Case, every_case
from .initial_values import TABLE, joined, plain, read, starts

KEPT = read()
REMEDY = "if meant, write the table anew by `python -m tests.conformance.values.initial_values` and say so under Numerics"


def differences(kept: dict[str, str], now: dict[str, str]) -> list[str]:
    names = sorted(kept.keys() | now.keys())
    return [f"{n}: {kept.get(n, 'absent')} -> {now.get(n, 'absent')}" for n in names if kept.get(n) != now.get(n)]


@pytest.mark.parametrize("case", every_case(), ids=lambda case: case.name)
def test_every_parameter_starts_where_it_did(case: Case) -> None:
    assert case.name in KEPT, f"{case.name} has no initial values in {TABLE.name}; {REMEDY}"
    changed = differences(KEPT[case.name], starts(case.config))
    assert not changed, "\n".join([f"initial values of {case.name}; {REMEDY}", *changed])


def test_the_plain_model_starts_where_it_did() -> None:
    assert not differences(KEPT["plain"], joined(plain()))
    assert KEPT.keys() == {"plain", *(case.name for case in every_case())}, f"cases that are gone; {REMEDY}"


def test_another_start_names_its_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault that no equivalence shows: another scale of the softmax that all layers share."""
    right = value_residual.ValueResidual.parameter

    def parameter(self: Any, name: str, shape: Any, init: Any, tag: Any, dead: Any = None) -> Any:
        return right(self, name, shape, Constant(init.value * 2) if name == "scale" else init, tag, dead)

    monkeypatch.setattr(value_residual.ValueResidual, "parameter", parameter)
    case = next(case for case in every_case() if case.name == "value_residual-plus")
    (changed,) = differences(KEPT[case.name], starts(case.config))
    assert changed == "blocks.0.attention.depth.scale: 1 mixing = 1 -> 1 mixing = 2"
