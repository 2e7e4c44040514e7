"""`twoaxis list`: what sits on each axis."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from twoaxis import DEPTH, FEED_FORWARD, LOCAL, SEQUENCE
from twoaxis.cli.output import Json, print_json
from twoaxis.cli.reference import depth_cost
from twoaxis.core.documentation import source
from twoaxis.core.errors import ConfigError, nearest, problem
from twoaxis.display.tables import print_table

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
        from twoaxis.cli.list_design import list_designs

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
    """A row as people read it."""
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
