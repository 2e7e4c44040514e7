"""`twoaxis list`: the mixers of each axis, and every method by its design."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twoaxis import DEPTH, FEED_FORWARD, LOCAL, SEQUENCE
from twoaxis.cli.models import depth_cost
from twoaxis.cli.output import Json, print_json
from twoaxis.core.errors import ConfigError, nearest, problem
from twoaxis.core.registry import source
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
    from twoaxis.core.design import LETTERS
    from twoaxis.planner.design_table import design_table, stated_shape

    rows = [row for row in design_table() if axis in (None, row.axis)]
    if as_json:
        print_json({"shape": stated_shape(), "methods": [row.to_data() for row in rows]})
        return
    print_item(LETTERS, "")
    print()
    _print("Query, key and normaliser", ("query", "key", "normaliser"), rows)
    _print("Values, window and injection of the sum", ("value", "window", "injection"), rows)
    _print("What weights depend on, and how parameters are shared", ("weights", "earlier tokens", "sets of parameters"), rows)
    names = [row.name for row in rows if row.design.literal]
    print_item(f"Literal instance of arXiv:2603.16039, section 2.2: {', '.join(names) or 'none of these'}.", "")
    print()
    table = [(row.name, *cost_cells(row), loss_cell(row)) for row in rows]
    title = "Costs and loss beyond the control"
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
    """The design of a method, by column."""
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
    """The loss of a method minus the control's, with the interval, in every valid study that has the method."""
    if row.kind == "residual":
        return "control"
    return "; ".join(f"{study}: {_difference(pair)}" for study, pair in row.losses) or NO_STUDY


def _difference(pair: "PairVerdict") -> str:
    if pair.difference is None:
        return "no verdict"
    interval = "" if pair.low is None else f" ({pair.low:+.3f} to {pair.high:+.3f})"
    return f"{pair.difference:+.3f}{interval}, {pair.verdict}, n = {pair.replicates}".replace("-", "\N{MINUS SIGN}")


AXES: dict[str, Any] = {"depth": DEPTH, "sequence": SEQUENCE, "feed_forward": FEED_FORWARD, "local": LOCAL}
TITLES = {"depth": "Depth axis", "sequence": "Sequence axis", "feed_forward": "Feed-forward", "local": "Inside a sublayer"}


def list_mixers(
    axis: Annotated[
        str | None, typer.Argument(help="depth, sequence, feed_forward or local; all of them when left out.")
    ] = None,
    design: Annotated[
        bool, typer.Option("--design", help="Compare methods by weights, window, injection, cost and loss.")
    ] = False,
    as_json: Json = False,
) -> None:
    """List every mixer of both axes, the feed-forwards between them, and the local mixers inside a sublayer.

    Parameters are what a mixer adds to 12 blocks at d_model 256, in its default form. Evidence: a certified form equals public
    code in outputs and all gradients; a reconstructed one follows a text. `twoaxis show NAME` says more about one.
    """
    if axis is not None and axis not in AXES:
        raise ConfigError(f"unknown axis {axis!r}; {nearest(axis, AXES)}")
    if design:
        if axis in ("feed_forward", "local"):
            raise ConfigError(problem("axis", axis, "depth or sequence with --design", "leave it out for both"))
        list_designs(axis, as_json)
        return
    tables = {name: [_row(name, row) for row in table] for name, table in AXES.items() if axis in (None, name)}
    if as_json:
        print_json(tables)
        return
    for name, rows in tables.items():
        columns = [column.replace("_", " ") for column in rows[0]]
        print_table(TITLES[name], columns, [list(_cells(row)) for row in rows], ("parameters",), whole=("kind",))
        print()


def _cells(row: Mapping[str, str | int]) -> Iterator[str]:
    """The cells of a row as text."""
    for name, value in row.items():
        yield f"{value:,}" if isinstance(value, int) else value.replace("_", " ") if name == "at_initialisation" else value


def _row(axis: str, row: Any) -> dict[str, str | int]:
    config = row.config()
    found: dict[str, str | int] = {"kind": row.kind, "summary": row.summary, "source": source(row.config)}
    if axis != "feed_forward":
        found["at_initialisation"] = config.init_equivalence.relation
    if axis == "depth":
        found["parameters"] = depth_cost(config).params
    return found | {"evidence": row.evidence, "status": row.status}
