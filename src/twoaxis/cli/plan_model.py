"""The plan of a model on many devices: from options to a plan."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from twoaxis.cli.output import print_json
from twoaxis.core.errors import ConfigError, nearest, problem
from twoaxis.display.tables import print_item

if TYPE_CHECKING:
    from twoaxis.planner.comparison import Budget
    from twoaxis.planner.hardware import Device
    from twoaxis.planner.methods import Goal
    from twoaxis.planner.model_plan import ModelPlan
    from twoaxis.planner.quantities import Precision


LONGEST_CONTEXT = 8192
"""The default tokens of a sequence, at most; many models accept far more than they are trained with."""

PRECISIONS = {
    "bf16": {},
    "fp32": {"weights": 4, "activations": 4, "gradients": 4, "optimizer": 8, "cache": 4},
}
"""Bytes per number; float32 weights have no separate master weights."""


def plan_of_model(
    source: str,
    as_json: bool,
    *,
    hardware: str = "h100",
    gpus: int = 8,
    goal: str | None = None,
    context: int | None = None,
    prompts: int = 8,
    budget_memory: str | None = None,
    budget_latency: str | None = None,
    precision: str | None = None,
    optimizer: str | None = None,
    html: Path | None = None,
    **arrangement: Any,
) -> int:
    """Plans a model and prints the plan; returns 1 if no method fits the budget.

    Args:
        source: a file, a folder or a preset.
        as_json: whether to print JSON.
        hardware: a device by name, or its file.
        gpus: devices in all.
        goal: of the reader.
        context: tokens of a sequence.
        prompts: sequences that generate at once.
        budget_memory: with its unit.
        budget_latency: with its unit.
        precision: one of `PRECISIONS`.
        optimizer: `adamw` or `muon`; None leaves that of the model.
        html: a file for the page.
        arrangement: fields of the request that are fixed.

    Raises:
        ConfigError: in one line, if it cannot be planned.
    """
    from twoaxis.planner.advice import RECOMMENDED
    from twoaxis.planner.hardware import read_device
    from twoaxis.planner.model import read_model
    from twoaxis.planner.model_plan import plan_model
    from twoaxis.planner.search import Request

    budget = _limits(budget_memory, budget_latency)
    if goal is not None:
        _known("goal", goal, tuple(RECOMMENDED))
    wanted = cast("Goal | None", goal)
    if prompts < 1:
        raise ConfigError(problem("prompts", prompts, "at least 1", "say how many sequences generate at once"))
    if html is not None and html.suffix != ".html":
        raise ConfigError(problem("html", str(html), "a file that ends in .html", f"write to {html.with_suffix('.html')}"))
    device, model = read_device(hardware), read_model(source)
    model = model if optimizer is None else model.with_optimizer(optimizer)
    tokens = min(model.max_seq_len, LONGEST_CONTEXT) if context is None else context
    request = Request(device, gpus, tokens, precision=_precision(device, precision), **arrangement)
    planned = plan_model(model, request, wanted, budget, prompts, _announce)
    if html is not None:
        _write_page(planned, html)
    _print(planned, as_json)
    return 0 if planned.fits_budget else 1


def _print(planned: "ModelPlan", as_json: bool) -> None:
    """Prints a plan, and notes on what is not counted."""
    from twoaxis.cli.plan_tables import print_model_plan

    if as_json:
        print_json(planned.to_data())
        return
    print_model_plan(planned)
    for line in planned.model.not_counted:
        print_item(f"Note: {line}", "")


def _limits(memory: str | None, latency: str | None) -> "Budget":
    from twoaxis.planner.comparison import Budget
    from twoaxis.planner.quantities import parse_bytes, parse_seconds

    return Budget(
        None if memory is None else parse_bytes(memory, "budget-memory"),
        None if latency is None else parse_seconds(latency, "budget-latency"),
    )


def _announce(name: str) -> None:
    print(f"planning: {name}", file=sys.stderr)


def _write_page(planned: "ModelPlan", path: Path) -> None:
    from twoaxis.planner.page import write_page

    goal = None if planned.recommendation is None else planned.recommendation.goal
    write_page(path, planned.model, planned.setting, "all" if goal in (None, "both") else goal, planned.prompts)
    print(f"wrote {path}", file=sys.stderr)


def _known(what: str, got: str, known: Sequence[str]) -> None:
    if got not in known:
        raise ConfigError(problem(what, got, f"one of {', '.join(known)}", nearest(got, known)))


def _precision(device: "Device", name: str | None) -> "Precision":
    """The precision by name; by default mixed bfloat16 if the device has it, else float32."""
    from twoaxis.planner.quantities import Precision

    formats = [str(known) for known in device.peak_flops_per_second]
    if name is None:
        name = "bf16" if "bf16" in formats else "fp32"
    _known("precision", name, tuple(PRECISIONS))
    if name not in formats:
        raise ConfigError(problem("precision", name, f"a number format of {device.name}", f"it has {', '.join(formats)}"))
    return Precision(**PRECISIONS[name])
