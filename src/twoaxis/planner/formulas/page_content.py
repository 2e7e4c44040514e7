"""The advice, figures, facts and table rows of the page from the numbers of its methods."""

from typing import Any

from twoaxis.planner.formulas.rows import gpus_of, sorted_by
from twoaxis.planner.formulas.svg import bars, lines, points, steps
from twoaxis.planner.formulas.written import BYTES, COUNTS, SECONDS, amount, percent

Data = dict[str, Any]


def tone_of(tables: Data, row: Data, goal: str, limit: float) -> str:
    """The CSS class of a method: its goal, whether the reader chose another one, and whether it exceeds the memory."""
    own = tables["methods"][row["method"]]["goal"]
    other = " other" if goal != "all" and own != goal and own != "control" else ""
    return own + other + (" over" if row["memory_bytes"] > limit else "")


def limit_of(tables: Data, choice: Data) -> float:
    """Bytes of a device that a plan may fill."""
    return tables["devices"][choice["device"]]["limit_bytes"]


def limit_text(tables: Data, choice: Data) -> str:
    """The limit of memory in words."""
    return amount(limit_of(tables, choice), BYTES) + ", 90 % of one " + tables["devices"][choice["device"]]["name"]


def ranked(tables: Data, rows: list[Data], goal: str) -> list[Data]:
    """The methods of a goal without the control, from the shortest training step to the longest."""
    methods = tables["methods"]
    own = [row for row in rows if row["method"] != rows[0]["method"]]
    return sorted_by([row for row in own if goal == "all" or methods[row["method"]]["goal"] == goal], "step_seconds")


def with_control(control: Data, rows: list[Data]) -> list[Data]:
    """The control, then other methods."""
    found = [control]
    for row in rows:
        found.append(row)
    return found


def advice(tables: Data, choice: Data, rows: list[Data], goal: str) -> str:
    """The paper's recommendation for a goal, or for each, with what it costs here, in one sentence."""
    said = ""
    for entry in tables["recommended"]:
        if goal == "all" or goal == entry["goal"]:
            said = said + ("; for " if len(said) > 0 else "For ") + entry["words"] + " the paper recommends "
            said = said + tables["methods"][entry["method"]]["name"] + ", which "
            said = said + cost_in_words(ranked(tables, rows, entry["goal"]), rows[0], entry["method"], tables, choice)
    return said + "."


def cost_in_words(own: list[Data], control: Data, method: int, tables: Data, choice: Data) -> str:
    """What a method costs, its rank among those of its goal, and what is cheapest within the limit if it exceeds that."""
    limit = limit_of(tables, choice)
    said = "does not fit this model here"
    instead = "no method of this goal is within it"
    for at in range(len(own)):
        row = own[len(own) - 1 - at]
        if row["memory_bytes"] <= limit:
            instead = tables["methods"][row["method"]]["name"] + " is the fastest within it"
    for at in range(len(own)):
        row = own[at]
        if row["method"] == method:
            said = "adds " + percent(overhead(row, control, "step_seconds")) + " to a training step (number " + str(at + 1)
            said = said + " of " + str(len(own)) + ") and needs " + amount(row["memory_bytes"], BYTES)
            over = row["memory_bytes"] > limit
            said = (
                said
                + (", over the limit of " if over else " of ")
                + limit_text(tables, choice)
                + ("; " + instead if over else "")
            )
    return said


def bars_of(tables: Data, rows: list[Data], key: str, goal: str, limit: float) -> list[Data]:
    """Bars of one number: seconds as a share beyond the control, caches as bytes beyond the control, memory whole."""
    shares = key == "step_seconds" or key == "token_seconds"
    given = []
    for row in sorted_by(rows, "step_seconds"):
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
                "tone": tone_of(tables, row, goal, limit),
            }
        )
    return given


def points_of(tables: Data, rows: list[Data], goal: str, limit: float) -> list[Data]:
    """Points of overhead and memory, the control first."""
    given = []
    for row in with_control(rows[0], ranked(tables, rows, "all")):
        share = overhead(row, rows[0], "step_seconds")
        name = tables["methods"][row["method"]]["name"]
        over = ", over the limit" if row["memory_bytes"] > limit else ""
        given.append(
            {
                "method": row["method"],
                "name": name,
                "x": share,
                "y": row["memory_bytes"],
                "tip": name + ": " + percent(share) + " more seconds, " + amount(row["memory_bytes"], BYTES) + over,
                "tone": tone_of(tables, row, goal, limit),
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
        name: `front`, `step`, `memory`, `token`, `cache`, `state` or `timeline`.
        width: in CSS pixels.
    """
    chosen = view["chosen"]
    goal = view["goal"]
    limit = limit_of(tables, choice)
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
                    "tone": tone_of(tables, row, goal, limit),
                }
            )
        return lines(series, chosen, "Bytes per token of the depth state along the stack; the numbers are in the table", width)
    if name == "front":
        said = "Overhead of a training step against memory, a point for each method; the numbers are in the table"
        return points(points_of(tables, rows, goal, limit), chosen, limit, limit_text(tables, choice), said, width)
    key = name + ("_seconds" if name == "step" or name == "token" else "_bytes")
    shown = limit if name == "memory" else 0
    said = "Bars of all methods, from the shortest training step to the longest; the numbers are in the table"
    return bars(bars_of(tables, rows, key, goal, limit), chosen, shown, limit_text(tables, choice), said, width)


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


def best_rows(tables: Data, choice: Data, rows: list[Data], view: Data) -> str:
    """The control, then the eight methods of the goal with the shortest training step within the limit."""
    limit = limit_of(tables, choice)
    within = [row for row in ranked(tables, rows, view["goal"]) if row["memory_bytes"] <= limit]
    drawn = ""
    for row in with_control(rows[0], within[:8]):
        cells = [
            percent(overhead(row, rows[0], "step_seconds")),
            amount(row["memory_bytes"], BYTES),
            percent(overhead(row, rows[0], "token_seconds")),
            amount(row["params"] - rows[0]["params"], COUNTS),
        ]
        drawn = drawn + table_row(row, tables["methods"][row["method"]]["name"], cells, view["chosen"], limit)
    return drawn


def table_row(row: Data, name: str, cells: list[str], chosen: int, limit: float) -> str:
    """One row of a table."""
    state = ("chosen " if row["method"] == chosen else "") + ("over" if row["memory_bytes"] > limit else "")
    drawn = '<tr class="' + state + '" data-method="' + str(row["method"]) + '"><th scope="row">' + name + "</th>"
    for cell in cells:
        drawn = drawn + '<td class="number">' + cell + "</td>"
    return drawn + "</tr>"


def table_rows(tables: Data, choice: Data, rows: list[Data], view: Data) -> str:
    """The rows, from the shortest training step to the longest; the control is the first of those given."""
    control = rows[0]
    limit = limit_of(tables, choice)
    drawn = ""
    for row in sorted_by(rows, "step_seconds"):
        cells = [
            amount(row["params"] - control["params"], COUNTS),
            amount(row["step_seconds"], SECONDS),
            percent(overhead(row, control, "step_seconds")),
            amount(row["depth_seconds"], SECONDS),
            amount(row["exposed_seconds"], SECONDS),
            amount(row["memory_bytes"], BYTES) + (" over" if row["memory_bytes"] > limit else ""),
            amount(row["sent_bytes"], BYTES),
            amount(row["token_seconds"], SECONDS),
            percent(overhead(row, control, "token_seconds")),
            amount(row["cache_bytes"], BYTES),
            amount(row["prompt_seconds"], SECONDS),
            amount(row["prompt_state_bytes"], BYTES),
        ]
        drawn = drawn + table_row(row, tables["methods"][row["method"]]["name"], cells, view["chosen"], limit)
    return drawn
