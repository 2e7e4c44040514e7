"""How deep a model and how finely cut a pipeline can be before each history costs more than the limit."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

from planner.scale.cases import Case, case
from planner.scale.compute import CONTROL, LIMIT, shape_of
from twoaxis.planner.coefficients import Data, coefficients
from twoaxis.planner.formulas.training_step import training_step
from twoaxis.planner.ledger import FORWARDINGS, Forwarding
from twoaxis.planner.methods import Refusal, fitted, methods

SHAPE, TOKENS = "dense-7b", 2**13

HISTORIES = (
    "AttnRes full",
    "AttnRes blocks, two-phase",
    "Delta AttnRes",
    "Depth ShortSWA",
    "DenseFormer 1x1",
    "DenseFormer 4x5",
    "ELC-BERT",
    "Vertical Attention",
    "DCA",
    "MUDDFormer",
    "LIMe",
)
"""Methods whose state holds more than streams: whatever lies behind the sublayer that runs."""

LAYERS = (8, 16, 24, 32, 48, 64)
VIRTUAL = (1, 2, 4, 8)

Row = dict[str, Any]


def by_layers(names: Sequence[str] = HISTORIES, layers: Sequence[int] = LAYERS) -> list[Row]:
    """The overhead of a training step of the 7B shape with other numbers of layers: `method`, `layers`, `overhead`."""
    at = case(SHAPE, TOKENS)
    return [
        {"method": name, "layers": count, "overhead": _overhead(at, name, count, at.layout.virtual, "cached")}
        for name in names
        for count in layers
    ]


def by_stages(names: Sequence[str] = HISTORIES, virtual: Sequence[int] = VIRTUAL) -> list[Row]:
    """The same with more virtual stages and each way of forwarding: `method`, `virtual`, `forwarding`, `overhead`."""
    at, layers = case(SHAPE, TOKENS), shape_of(SHAPE).n_layers
    return [
        {"method": name, "virtual": count, "forwarding": way, "overhead": _overhead(at, name, layers, count, way)}
        for name in names
        for count in virtual
        for way in FORWARDINGS
    ]


def crossing(points: Sequence[tuple[float, float]], limit: float = LIMIT) -> float | None:
    """Where a line through points rises above a limit; the first point where it begins above, None where it never does.

    Example:
        >>> crossing([(8, 0.01), (16, 0.03), (32, 0.07)]), crossing([(8, 0.06)]), crossing([(8, 0.01)])
        (24.0, 8, None)
    """
    if points and points[0][1] > limit:
        return points[0][0]
    for (x, low), (next_x, high) in pairwise(points):
        if low <= limit < high:
            return x + (next_x - x) * (limit - low) / (high - low)
    return None


def _overhead(at: Case, name: str, layers: int, virtual: int, way: Forwarding) -> float:
    return _seconds(at, name, layers, virtual, way) / _seconds(at, CONTROL, layers, virtual, "cached") - 1


@lru_cache(maxsize=512)
def _seconds(at: Case, name: str, layers: int, virtual: int, way: Forwarding) -> float:
    setting = at.training(forwarding=way)
    layout = setting.layout.model_copy(update={"virtual": virtual})
    setting = setting.replace(layout=layout)
    return training_step(_numbers(name, layers), at.run(setting), setting.rates, setting.links)["step_seconds"]


@lru_cache(maxsize=128)
def _numbers(name: str, layers: int) -> Data:
    whole = shape_of(SHAPE)
    model = replace(whole, blocks=tuple(whole.blocks[index % whole.n_layers] for index in range(layers)))
    found = fitted(next(method for method in methods() if method.name == name), model)
    assert not isinstance(found, Refusal), found.reason
    return coefficients(found)
