"""The page: data, formulas and style in one file that asks for nothing else."""

import json
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from twoaxis.core.atomic import replacing
from twoaxis.core.errors import ConfigError, problem
from twoaxis.planner.formulas.choice import refusal
from twoaxis.planner.formulas.figures import facts, figure, table_rows
from twoaxis.planner.formulas.rows import method_row, methods_of, step_of
from twoaxis.planner.methods import Refusal, fitted, methods
from twoaxis.planner.model.shape import ModelShape
from twoaxis.planner.page.controls import GOALS, controls
from twoaxis.planner.page.data import Data, first_choice, tables
from twoaxis.planner.setting import Setting

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
"""What a browser may load for the page: nothing that is not in it."""

WIDTHS = {
    "step": (470, 330),
    "memory": (470, 330),
    "token": (470, 330),
    "cache": (470, 330),
    "state": (980, 330),
    "timeline": (980, 330),
}
"""Of each figure in CSS pixels, on a wide screen and on a narrow one."""

FIGURES = {
    "step": ("A training step", "More seconds than the control, the residual stream, whose own are given."),
    "memory": ("Memory", "Bytes that the fullest device holds at the peak of a training step."),
    "token": (
        "A token of generation",
        "More seconds than the control for one more token of every sequence, behind all its tokens.",
    ),
    "cache": ("Cache", "Bytes of one sequence that generation keeps more than the control, whose own are given."),
    "state": (
        "Depth state",
        "Bytes per token that a sublayer hands to the next, and a stage to the next: what a pipeline sends.",
    ),
    "timeline": (
        "One training step of the method in detail",
        "Blue: forward passes, orange: backward passes, by the numbers of their microbatches where they fit; later stages of a "
        "rank are paler. Thin bars below: activations and gradients sent. Grey: the rank waits.",
    ),
}

COLUMNS = (
    *("Method", "Parameters added", "Training step", "Overhead", "Depth operations", "Exposed communication", "Memory"),
    *("Sent per microbatch", "Token", "Overhead", "Cache", "Prompts read", "Depth state meanwhile"),
)

LIMITS = (
    "All numbers are computed from declared costs and the figures of a device; nothing is measured here. Depth operations are "
    "fused, one kernel for each read and write, which is the least that they cost: `twoaxis plan` also counts the kernels of "
    "unfused ones. With fewer blocks the model has its first ones, with more it repeats all of them from the first on."
)


def planner_page(model: ModelShape, setting: Setting, goal: str = "all") -> str:
    """The page of a plan, which recomputes with the same formulas what a reader changes.

    Args:
        model: every method is planned for it.
        setting: where the page starts; it is shown without scripts, too.
        goal: methods that stand out: `all`, `shortcut` or `local-mixing`.

    Raises:
        ConfigError: a setting that cannot run, such as one with more stages than blocks, or another goal.
    """
    goals = tuple(value for value, _ in GOALS)
    if goal not in goals:
        raise ConfigError(problem("goal", goal, f"one of {', '.join(goals)}", "use one of them"))
    found = tables(model, setting)
    choice = first_choice(found, model, setting)
    if reason := refusal(choice, found["devices"][choice["device"]], model.n_layers):
        raise ConfigError(f"setting: {reason}")
    view = {"goal": goal, "chosen": _chosen(found, choice, goal)}
    page = {"tables": found, "choice": choice, "view": view, "widths": WIDTHS}
    rows = [method_row(found, choice, method) for method in methods_of(found, choice)]
    step = step_of(found, choice, view["chosen"])
    title = f"Plan of {model.name}"
    head = (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" '
        f'content="{POLICY}">\n<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n<style>{_file('style.css')}</style>\n</head>\n<body>\n"
    )
    drawn = {name: [figure(found, choice, rows, step, view, name, width) for width in WIDTHS[name]] for name in FIGURES}
    results = _results(drawn, facts(choice, rows, step, view), rows, found, view)
    return (
        f'{head}<a class="skip" href="#results">Skip to the results</a>\n'
        f'<header><p class="kicker">twoaxis plan<button type="button" class="theme" hidden>Dark</button></p>'
        f"<h1>{escape(title)}: what each method costs</h1></header>\n"
        f'<div class="sides"><aside><details open><summary>What is planned</summary>{controls(found, choice, model, view)}'
        f'</details></aside>\n<main id="results">\n{results}\n</main></div>\n'
        f"<footer><p>{escape(LIMITS)}</p>{_refused(model)}</footer>\n"
        f'<script type="application/json" id="data">{_json(page)}</script>\n'
        f"<script>{_file('formulas.js')}</script>\n<script>{_file('behaviour.js')}</script>\n</body>\n</html>\n"
    )


def write_page(path: str | Path, model: ModelShape, setting: Setting, goal: str = "all") -> None:
    """Writes the page into a file, whole or not at all.

    Args:
        path: of the file.
        model: as for `planner_page`, which see for the rest.
        setting: where it starts.
        goal: methods that stand out.

    Raises:
        ConfigError: a setting that cannot run.
        DataError: the file cannot be written.
    """
    text = planner_page(model, setting, goal)
    with replacing(Path(path)) as file:
        file.write(text.encode())


def _chosen(found: Data, choice: Data, goal: str) -> int:
    """The method in detail: the one that the paper recommends for the goal, where it fits, else the control."""
    wanted = "ShortSWA" if goal == "local-mixing" else "DDL"
    fitting = methods_of(found, choice)
    return next((method for method in fitting if found["methods"][method]["name"] == wanted), fitting[0])


def _results(drawn: dict[str, list[str]], known: list[list[str]], rows: list[Data], found: Data, view: Data) -> str:
    inner = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in known)
    figures = "\n".join(
        f'<section id="{name}"><h2>{title}</h2><figure>'
        f'<div class="plot wide">{drawn[name][0]}</div><div class="plot narrow">{drawn[name][1]}</div>'
        f"<figcaption>{caption}</figcaption></figure></section>"
        for name, (title, caption) in FIGURES.items()
    )
    names = [method["name"] for method in found["methods"]]
    columns = "".join(
        f'<th scope="col" class="{"text" if at == 0 else "number"}">{name}</th>' for at, name in enumerate(COLUMNS)
    )
    return (
        f'<p id="refusal" role="alert" hidden></p>\n<dl class="facts" id="facts" aria-live="polite">{inner}</dl>\n'
        '<ul class="legend"><li class="control">the control</li><li class="shortcut">mixes along depth</li>'
        '<li class="local-mixing">mixes along positions</li></ul>\n'
        f'<div class="figures">{figures}</div>\n<section id="numbers"><h2>Numbers</h2><div class="scroll"><table>'
        f"<thead><tr>{columns}</tr></thead><tbody>{table_rows(rows, names, view['chosen'])}</tbody></table></div></section>"
    )


def _refused(model: ModelShape) -> str:
    """The methods that do not fit the model, with the reason."""
    found = [fit for method in methods() if isinstance(fit := fitted(method, model), Refusal)]
    items = "".join(f"<li>{escape(refusal.method.name)}: {escape(refusal.reason)}</li>" for refusal in found)
    return f"<p>Not for {escape(model.name)}:</p><ul>{items}</ul>" if items else ""


def _json(data: Any) -> str:
    """JSON that may stand in a page: nothing in it ends the script."""
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")


@cache
def _file(name: str) -> str:
    return (files("twoaxis.planner.page") / name).read_text(encoding="utf-8")
