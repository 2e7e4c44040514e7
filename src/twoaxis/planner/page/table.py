"""The numbers of all methods as the rows of an HTML table; the page runs this module as it stands."""

from typing import Any

from twoaxis.planner.page.rows import sorted_by
from twoaxis.planner.page.written import BYTES, COUNTS, SECONDS, amount, percent

Data = dict[str, Any]


def overhead(row: Data, control: Data, key: str) -> float:
    """How much more of something a method takes than the control."""
    return row[key] / control[key] - 1


def table_rows(rows: list[Data], names: list[str], chosen: int) -> str:
    """The rows, from the shortest training step to the longest; the control is the first of those given."""
    control = rows[0]
    drawn = ""
    for row in sorted_by(rows, "step_seconds"):
        cells = [
            amount(row["params"] - control["params"], COUNTS),
            amount(row["step_seconds"], SECONDS),
            percent(overhead(row, control, "step_seconds")),
            amount(row["depth_seconds"], SECONDS),
            amount(row["exposed_seconds"], SECONDS),
            amount(row["memory_bytes"], BYTES),
            amount(row["sent_bytes"], BYTES),
            amount(row["token_seconds"], SECONDS),
            percent(overhead(row, control, "token_seconds")),
            amount(row["cache_bytes"], BYTES),
            amount(row["prompt_seconds"], SECONDS),
            amount(row["prompt_state_bytes"], BYTES),
        ]
        state = ' class="chosen"' if row["method"] == chosen else ""
        drawn = drawn + "<tr" + state + ' data-method="' + str(row["method"]) + '"><th scope="row">'
        drawn = drawn + names[row["method"]] + "</th>"
        for cell in cells:
            drawn = drawn + '<td class="number">' + cell + "</td>"
        drawn = drawn + "</tr>"
    return drawn
