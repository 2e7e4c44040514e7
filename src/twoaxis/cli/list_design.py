"""`twoaxis list --design`: every method by how it forms its weights, what it costs, and what studies say of its loss."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from twoaxis.cli.output import print_json
from twoaxis.display.numbers import bytes_text, count_text
from twoaxis.display.tables import print_item, print_table

if TYPE_CHECKING:
    from twoaxis.planner.design_table import MethodRow
    from twoaxis.planner.evidence import PairVerdict

NO_STUDY = "no valid study"

COSTS = ("parameters", "FLOPs", "saved", "sent")
"""Columns; all but parameters are per token."""


def list_designs(axis: str | None, as_json: bool) -> None:
    """Prints the table in four parts that fit 80 columns, or all of it as JSON.

    Args:
        axis: `depth` or `sequence`; None takes both.
        as_json: whether to print JSON.
    """
    from twoaxis.core.mixing_design import LETTERS
    from twoaxis.planner.design_table import design_table, stated_shape

    rows = [row for row in design_table() if axis in (None, row.axis)]
    if as_json:
        print_json({"shape": stated_shape(), "methods": [row.to_data() for row in rows]})
        return
    print_item(LETTERS, "")
    print()
    _print("What asks, and what it is compared with", ("query", "key", "normaliser"), rows)
    _print("What is summed, from where, and where the sum goes", ("value", "window", "injection"), rows)
    _print("What weights depend on, and who shares parameters", ("weights", "earlier tokens", "sets of parameters"), rows)
    names = [row.name for row in rows if row.design.literal]
    print_item(f"Literal instance of arXiv:2603.16039, section 2.2: {', '.join(names) or 'none of these'}.", "")
    print()
    table = [(row.name, *cost_cells(row), loss_cell(row)) for row in rows]
    title = "What each costs beyond the control, and the loss it adds"
    print_table(title, ("method", *COSTS, "loss"), table, COSTS, whole=("method",))
    print_item(
        f"Costs: {stated_shape()}. FLOPs and bytes are per token; the first row is the control as a whole. --json gives all.",
        "",
    )


def _print(title: str, columns: Sequence[str], rows: "Sequence[MethodRow]") -> None:
    cells = [(row.name, *(design_cells(row)[name] for name in columns)) for row in rows]
    print_table(title, ("method", *columns), cells, whole=("method",))
    print()


def design_cells(row: "MethodRow") -> dict[str, str]:
    """What the design of a method says, by column."""
    design = row.design
    sets = {"none": "none", "model": "1 for the model", "block": "1 a block", "sublayer": "1 a sublayer"}
    return {
        "query": design.query,
        "key": design.key,
        "value": design.value,
        "normaliser": design.normaliser,
        "window": design.window,
        "sets of parameters": sets[design.sharing],
        "injection": design.injection,
        "weights": design.weights,
        "earlier tokens": "yes" if design.position else "no",
        "literal": "yes" if design.literal else "no",
    }


def cost_cells(row: "MethodRow") -> tuple[str, ...]:
    """Counts of a method, in the order of `COSTS`."""
    counts = row.counts
    return (
        count_text(counts.params),
        count_text(counts.flops_per_token),
        bytes_text(counts.saved_bytes_per_token),
        bytes_text(counts.boundary_bytes_per_token),
    )


def loss_cell(row: "MethodRow") -> str:
    """The loss of a method minus the control's, with the interval, in every valid study that has it."""
    if row.kind == "residual":
        return "control"
    return "; ".join(f"{study}: {_difference(pair)}" for study, pair in row.losses) or NO_STUDY


def _difference(pair: "PairVerdict") -> str:
    if pair.difference is None:
        return "no verdict"
    interval = "" if pair.low is None else f" ({pair.low:+.3f} to {pair.high:+.3f})"
    return f"{pair.difference:+.3f}{interval}, {pair.verdict}, n = {pair.replicates}".replace("-", "\N{MINUS SIGN}")
