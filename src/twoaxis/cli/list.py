"""`twoaxis list`: what sits on each axis."""

from typing import Any

from twoaxis import DEPTH, FEED_FORWARD, SEQUENCE
from twoaxis.cli.output import Json, print_json, print_table

AXES: dict[str, Any] = {"depth": DEPTH, "sequence": SEQUENCE, "feed_forward": FEED_FORWARD}


def list_mixers(as_json: Json = False) -> None:
    """List every mixer of both axes, and the feed-forwards between them.

    `twoaxis show NAME` says more about one of them.
    """
    tables = {axis: [_row(axis, row) for row in table] for axis, table in AXES.items()}
    if as_json:
        print_json(tables)
        return
    titles = {"depth": "Depth axis", "sequence": "Sequence axis", "feed_forward": "Feed-forward"}
    for axis, rows in tables.items():
        columns = list(rows[0])
        print_table(titles[axis], columns, [[row[column] for column in columns] for row in rows])
        print()


def _row(axis: str, row: Any) -> dict[str, str]:
    found = {"kind": row.kind, "summary": row.summary}
    if axis == "depth":
        found["at initialisation"] = row.example(next(iter(row.examples))).init_equivalence.relation.replace("_", " ")
    return found | {"status": row.status}
