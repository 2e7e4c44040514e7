"""The figures, facts and table rows of the page from the numbers of its methods."""

from typing import Any

from twoaxis.planner.formulas.rows import gpus_of, sorted_by
from twoaxis.planner.formulas.svg import bars, lines, steps
from twoaxis.planner.formulas.written import BYTES, COUNTS, SECONDS, amount, percent

Data = dict[str, Any]


def tone_of(tables: Data, method: int, goal: str) -> str:
    """The CSS class of a method: its goal, and whether the reader chose another one."""
    own = tables["methods"][method]["goal"]
    return own + (" other" if goal != "all" and own != goal and own != "control" else "")


def bars_of(tables: Data, rows: list[Data], key: str, goal: str) -> list[Data]:
    """Bars of one number: seconds as a share beyond the control, caches as bytes beyond the control, memory whole."""
    shares = key == "step_seconds" or key == "token_seconds"
    given = []
    for row in rows:
        value = row[key]
        text = amount(value, SECONDS if shares else BYTES)
        if row["method"] != rows[0]["method"] and shares:
            text = percent(overhead(row, rows[0], key))
        if row["method"] != rows[0]["method"] and key == "cache_bytes":
            text = amount(value - rows[0][key], BYTES)
        if shares:
            value = overhead(row, rows[0], key)
        if key == "cache_bytes":
            value = value - rows[0][key]
        given.append(
            {
                "method": row["method"],
                "name": tables["methods"][row["method"]]["name"],
                "value": value,
                "text": text,
                "tone": tone_of(tables, row["method"], goal),
            }
        )
    return given


def figure(tables: Data, choice: Data, rows: list[Data], step: Data, view: Data, name: str, width: int) -> str:
    """A figure by its name.

    Args:
        tables: of the page.
        choice: of the reader.
        rows: of all methods that fit, the control first.
        step: a training step of the method in detail.
        view: `goal`, and `chosen`, the method in detail.
        name: `step`, `memory`, `token`, `cache`, `state` or `timeline`.
        width: in CSS pixels.
    """
    chosen = view["chosen"]
    goal = view["goal"]
    label = tables["methods"][chosen]["name"]
    if name == "timeline":
        said = "Timeline of a training step with " + label
        return steps(step["simulation"], choice["virtual"], choice["microbatches"], said, width)
    if name == "state":
        series = []
        for row in rows:
            series.append(
                {
                    "method": row["method"],
                    "name": tables["methods"][row["method"]]["name"],
                    "values": row["states"],
                    "tone": tone_of(tables, row["method"], goal),
                }
            )
        return lines(series, chosen, "Bytes per token of the depth state along the stack; the numbers are in the table", width)
    key = name + ("_seconds" if name == "step" or name == "token" else "_bytes")
    device = tables["devices"][choice["device"]]
    limit = device["memory_bytes"] if name == "memory" else 0
    words = "memory of one " + device["name"] if name == "memory" else ""
    said = "Bars of all methods; the numbers are in the table"
    return bars(bars_of(tables, rows, key, goal), chosen, limit, words, said, width)


def facts(choice: Data, rows: list[Data], step: Data, view: Data) -> list[list[str]]:
    """Names and values that summarise the choice."""
    found = {"row": rows[0]}
    for row in rows:
        if row["method"] == view["chosen"]:
            found["row"] = row
    row = found["row"]
    return [
        ["devices", str(gpus_of(choice))],
        ["tokens in a step", amount(choice["batch"] * choice["tokens"], COUNTS)],
        ["step of the control", amount(rows[0]["step_seconds"], SECONDS)],
        ["step of the method", amount(row["step_seconds"], SECONDS)],
        ["overhead", percent(overhead(row, rows[0], "step_seconds"))],
        ["tokens a second", amount(row["tokens_per_second"], COUNTS)],
        ["bubble", percent(step["bubble"])],
        ["exposed communication", amount(step["exposed_seconds"], SECONDS)],
    ]


def overhead(row: Data, control: Data, key: str) -> float:
    """The share by which a method exceeds the control in one number."""
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
