"""Adapters take every size and option from the fixture: the same formats at other shapes, made from the equations."""

from pathlib import Path

import pytest

from .adapters import claimed_by
from .conftest import KEPT
from .golden import Golden, Tolerance
from .made import MADE
from .made.muddformer import TWINS


@pytest.mark.parametrize("name", MADE)
def test_another_shape_passes(name: str, tmp_path: Path) -> None:
    golden = MADE[name]().write(tmp_path)
    run = claimed_by(golden.name)
    assert run is not None, f"no adapter claims {golden.name}"
    golden.compare(run(golden))


@pytest.mark.parametrize("name", TWINS)
def test_a_float64_twin_is_the_authors_run_up_to_float32(name: str) -> None:
    """So that the equations it is made from are those of the code; its parameters are the stored ones."""
    twin, stored = TWINS[name](), Golden.read(KEPT / f"{name.replace('f64', 'f32')}.json")
    bound = Tolerance.parse(stored.about["tolerance"])
    for tensor, value in stored.tensors.items():
        scale = float(value.abs().max())
        largest = bound.gradient_of_largest if tensor.startswith("grad/") else bound.output / max(1.0, scale)
        assert largest is not None
        difference = float((twin.tensors[tensor].detach() - value).abs().max())
        assert difference <= largest * max(scale, 1e-30), f"{tensor}: {difference} of {scale}"
