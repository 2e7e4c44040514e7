"""The timeline of a pipeline step as SVG; the page runs this module as it stands."""

from typing import Any

from twoaxis.planner.page.bars import box_at, line_at, opening, text_at
from twoaxis.planner.page.written import SECONDS, amount, place

Data = dict[str, Any]

RANK = 28


def steps(result: Data, stages: int, microbatches: int, label: str, width: int) -> str:
    """One row for each rank: forward and backward passes, later stages paler, and below them what the rank sends.

    Args:
        result: what `pipeline.schedules.simulate` has returned.
        stages: on each rank.
        microbatches: of the step; where more than are simulated, the figure says so.
        label: the figure in words.
        width: in CSS pixels.
    """
    ranks = len(result["idle_share"])
    left = 52
    right = width - 14
    height = RANK * ranks + 26
    scale = (right - left) / result["step_seconds"]
    drawn = opening(width, height, label)
    for rank in range(ranks):
        drawn = drawn + text_at(left - 8, RANK * rank + 15, "end", "tick", "rank " + str(rank))
        drawn = drawn + box_at(left, RANK * rank + 2, right - left, RANK - 5, "idle")
    for turn in range(stages):
        for kind in ["forward", "backward"]:
            path = ""
            for action in result["actions"]:
                if action["kind"] == kind and action["stage"] // ranks == turn:
                    path = path + outline(action, left, RANK * action["rank"] + 2, scale, RANK - 10, 0.4)
            shade = " paler" if 2 * turn >= stages and stages > 1 else ""
            drawn = drawn + '<path d="' + path + '" class="' + kind + shade + '"/>'
    for kind in ["forward", "backward"]:
        path = ""
        for sent in result["transfers"]:
            if sent["kind"] == kind:
                below = RANK * sent["source"] + RANK - 8 + (0 if kind == "forward" else 2.5)
                path = path + outline(sent, left, below, scale, 2.5, 0)
        drawn = drawn + '<path d="' + path + '" class="sent ' + kind + '"/>'
    drawn = drawn + numbers(result, left, scale)
    bottom = RANK * ranks + 2
    drawn = drawn + line_at(left, bottom, right, bottom, "axis")
    drawn = drawn + text_at(left, bottom + 16, "start", "tick", "0")
    shown = 0
    for action in result["actions"]:
        shown = max(shown, action["microbatch"] + 1)
    middle = amount(result["step_seconds"] / 2, SECONDS)
    if shown < microbatches:
        middle = str(shown) + " of the " + str(microbatches) + " microbatches"
    drawn = drawn + text_at((left + right) / 2, bottom + 16, "middle", "tick", middle)
    return drawn + text_at(right, bottom + 16, "end", "tick", amount(result["step_seconds"], SECONDS)) + "</svg>"


def outline(action: Data, left: float, top: float, scale: float, height: float, gap: float) -> str:
    """One rectangle of a path."""
    length = (action["end"] - action["start"]) * scale
    # Bars that the gap between them would hide have none.
    length = length - gap if length > 3 * gap else length
    across = "h" + place(length) + "v" + place(height) + "h" + place(0 - length) + "z"
    return "M" + place(left + action["start"] * scale) + " " + place(top) + across


def numbers(result: Data, left: float, scale: float) -> str:
    """The microbatches, where they fit."""
    drawn = ""
    for action in result["actions"]:
        word = str(action["microbatch"])
        if (action["end"] - action["start"]) * scale >= 7 * len(word) + 3:
            middle = left + (action["start"] + action["end"]) / 2 * scale
            drawn = drawn + text_at(middle, RANK * action["rank"] + 15, "middle", "number", word)
    return drawn
