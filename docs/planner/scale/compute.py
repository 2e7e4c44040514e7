"""What every method adds to a training step, to a prefill and to a step of generation, and to memory, in each case."""

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from planner.scale.cases import CASES, CHUNK_TOKENS, Case
from twoaxis.planner.coefficients import Data, Engine, coefficients_of_both_forms
from twoaxis.planner.formulas.collectives import hop_bytes
from twoaxis.planner.formulas.roofline import bound, depth_operator, operator_seconds
from twoaxis.planner.formulas.training_step import edges_of, training_step, work_of
from twoaxis.planner.ledger import FORWARDINGS
from twoaxis.planner.methods import Method, Refusal, fitted, methods
from twoaxis.planner.model import read_model
from twoaxis.planner.model.shape import ModelShape

LIMIT = 0.05
"""The overhead that the page asks about."""

CONTROL = "residual"

EAGER_METHODS = (CONTROL, "AttnRes full", "AttnRes blocks", "DenseFormer 1x1", "DDL", "mHC", "ShortSWA w=128")
EAGER_SHAPES = ("dense-7b",)
"""Where kernels are counted one by one, which takes long."""

Row = dict[str, Any]


def scale(cases: Iterable[Case] = CASES, names: Iterable[str] | None = None) -> list[Row]:
    """One row for each case and method that fits it; the control comes first in each case.

    Args:
        cases: the cases.
        names: of methods; None takes all of them.

    Returns:
        rows with `shape`, `tokens`, `method`, `axis`; `training` and `forwarding`: see `training_row`; `serving`: see
        `serving_row`; or `refusal`: why the method does not fit the shape.
    """
    wanted = None if names is None else {CONTROL, *names}
    rows = []
    for case in cases:
        control = plain(case.shape)
        for method in methods():
            if wanted is not None and method.name not in wanted:
                continue
            row: Row = {"shape": case.shape, "tokens": case.tokens, "method": method.name, "axis": method.axis}
            found = numbers_of(method, case.shape)
            if found is None:
                rows.append(row | {"refusal": refusal(method, case.shape)})
                continue
            row["training"] = training_row(case, found[0], control[0])
            row["forwarding"] = forwarding_rows(case, found[0], control[0], row["training"]["overhead"])
            row["serving"] = serving_row(case, found[1], control[1])
            rows.append(row)
    return rows


def eager(names: Iterable[str] = EAGER_METHODS) -> list[Row]:
    """The overheads of a few methods with one kernel for each operation, at the shortest context of the smallest shape."""
    rows = []
    for case in CASES:
        if case.shape not in EAGER_SHAPES:
            continue
        control = plain(case.shape, "eager")
        for method in methods():
            if method.name in names and (found := numbers_of(method, case.shape, "eager")) is not None:
                row: Row = {"shape": case.shape, "tokens": case.tokens, "method": method.name}
                row["training"] = training_row(case, found[0], control[0], "eager")
                rows.append(row | {"serving": serving_row(case, found[1], control[1], "eager")})
    return rows


@lru_cache(maxsize=4)
def shape_of(name: str) -> ModelShape:
    """A preset."""
    return read_model(name)


def refusal(method: Method, shape: str) -> str:
    """Why a method does not fit a shape; empty where it does."""
    found = fitted(method, shape_of(shape))
    return found.reason if isinstance(found, Refusal) else ""


def plain(shape: str, engine: Engine = "fused") -> tuple[Data, Data]:
    """The numbers of a shape with the residual stream, in training and in generation."""
    return numbers_of_model(shape_of(shape), engine)


def numbers_of(method: Method, shape: str, engine: Engine = "fused") -> tuple[Data, Data] | None:
    """The numbers of a shape with a method, in training and in generation; None where it does not fit."""
    found = _fitted(method.name, shape)
    return None if isinstance(found, Refusal) else numbers_of_model(found, engine)


@lru_cache(maxsize=128)
def _fitted(name: str, shape: str) -> ModelShape | Refusal:
    return fitted(next(method for method in methods() if method.name == name), shape_of(shape))


_NUMBERS: dict[tuple[int, Engine], tuple[ModelShape, tuple[Data, Data]]] = {}


def numbers_of_model(model: ModelShape, engine: Engine = "fused") -> tuple[Data, Data]:
    """The numbers of a model, in training and in the form that it generates in."""
    key = (id(model), engine)
    if key not in _NUMBERS:
        # The model is kept too, or another one could get its id.
        _NUMBERS[key] = model, coefficients_of_both_forms(model, engine=engine)
    return _NUMBERS[key][1]


def training_row(case: Case, numbers: Data, control: Data, engine: Engine = "fused") -> Row:
    """A training step against that of the control, with caching across stages.

    Returns:
        `seconds`; `overhead`; its parts, which add up to it: `depth` operations and other `sublayers` with the idle time that
        they bring along in proportion, `exposed` transfers, `idle` time of stages that wait for slower ones, `update` of the
        weights; `depth_bound`: what most of the depth operations' time is spent on; `memory_bytes` of the fullest rank;
        `fits`: whether a device has as many.
    """
    setting = case.training(engine)
    run, rates = case.run(setting), setting.rates
    step = training_step(numbers, run, rates, setting.links)
    base = _control_step(case, control, engine)
    whole = base["step_seconds"]
    stretch = base["pipeline_seconds"] / _busy(base)
    depth = stretch * (step["depth_seconds"] - base["depth_seconds"])
    parts = {
        "depth": depth,
        "sublayers": stretch * (_busy(step) - _busy(base)) - depth,
        "exposed": step["exposed_seconds"] - base["exposed_seconds"],
        "update": sum(step[name] - base[name] for name in ("gradient_seconds", "optimizer_seconds")),
    }
    total = step["step_seconds"] - whole
    parts["idle"] = total - sum(parts.values())
    return {
        "seconds": step["step_seconds"],
        "overhead": total / whole,
        **{name: value / whole for name, value in parts.items()},
        "depth_bound": depth_bound(numbers, run, rates),
        "memory_bytes": max(step["memory_bytes"]),
        "fits": max(step["memory_bytes"]) <= setting.device.memory_bytes.value,
    }


def simulated_step(case: Case, name: str) -> Data:
    """A training step of one method in full, its simulation included; see `formulas.step.training_step`."""
    found = numbers_of(next(method for method in methods() if method.name == name), case.shape)
    assert found is not None, f"{name} does not fit {case.shape}"
    setting = case.training()
    return training_step(found[0], case.run(setting), setting.rates, setting.links)


def _busy(step: Data) -> float:
    return step["pipeline_seconds"] * (1 - step["bubble"])


def depth_bound(numbers: Data, run: Data, rates: Data) -> str:
    """What most of the time of the depth operations is spent on: `compute`, `memory` or `launch`."""
    spent: dict[str, float] = {}
    for way in ("forward", "backward"):
        for sublayer in numbers["sublayers"]:
            operation = depth_operator(numbers, sublayer["depth"], work_of(run), way)
            by = bound(operation, rates)
            spent[by] = spent.get(by, 0.0) + operator_seconds(operation, rates)
    return max(spent, key=lambda by: spent[by])


def forwarding_rows(case: Case, numbers: Data, control: Data, cached: float) -> Row:
    """`overhead` of a training step and `boundary_bytes` per token at the worst boundary, by the way of forwarding.

    Args:
        case: the case.
        numbers: of the method.
        control: numbers of the control.
        cached: the overhead with caching, which is known already.
    """
    rows = {}
    for way in FORWARDINGS:
        setting = case.training(forwarding=way)
        run = case.run(setting)
        overhead = cached
        if way != "cached":
            step = training_step(numbers, run, setting.rates, setting.links)
            overhead = step["step_seconds"] / _control_step(case, control)["step_seconds"] - 1
        hops = hop_bytes(numbers["leaves"], edges_of(numbers, run), run["pipeline"], way)
        rows[way] = {"overhead": overhead, "boundary_bytes": max(hops)}
    return rows


_CONTROL_STEPS: dict[tuple[Case, Engine, int], Data] = {}


def _control_step(case: Case, control: Data, engine: Engine = "fused") -> Data:
    """A training step of the control, which sends one stream in every way of forwarding."""
    key = (case, engine, len(control["sublayers"]))
    if key not in _CONTROL_STEPS:
        setting = case.training(engine)
        _CONTROL_STEPS[key] = training_step(control, case.run(setting), setting.rates, setting.links)
    return _CONTROL_STEPS[key]


def serving_row(case: Case, numbers: Data, control: Data, engine: Engine = "fused") -> Row:
    """A prefill and a step of generation against those of the control.

    Returns:
        `prefill_seconds`, `prefill` and `generation`: overheads; `generation_seconds`; `state_bytes` of a prefill in one and
        `chunked_bytes` of one in chunks, on one rank; `free_bytes`: what weights and the cache of a batch leave there.
    """
    setting = case.serving(engine)
    numbers, control = (each | {"weights_bytes": case.weights_bytes} for each in (numbers, control))
    prefill, base_prefill = (setting.prefill(each, 1, case.tokens)["seconds"] for each in (numbers, control))
    token, base_token = (
        setting.generation_step(each, case.serving_batch, case.tokens)["seconds"] for each in (numbers, control)
    )
    kept = setting.generation_bytes(numbers, case.serving_batch, case.tokens)
    return {
        "prefill_seconds": prefill,
        "prefill": prefill / base_prefill - 1,
        "generation_seconds": token,
        "generation": token / base_token - 1,
        "state_bytes": setting.prefill_state_bytes(numbers, 1, case.tokens),
        "chunked_bytes": setting.prefill_state_bytes(numbers, 1, case.tokens, CHUNK_TOKENS),
        "free_bytes": setting.device.memory_bytes.value - kept,
    }
