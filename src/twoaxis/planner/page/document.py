"""The page: data, formulas and style in one file that loads nothing else."""

from collections.abc import Sequence
from pathlib import Path

from twoaxis.core.errors import ConfigError, problem
from twoaxis.core.files import replacing
from twoaxis.display.html import render
from twoaxis.planner.evidence import StudyEvidence, evidence
from twoaxis.planner.formulas.page_content import advice, best_rows, facts, figure, table_rows
from twoaxis.planner.formulas.rows import method_row, methods_of, refusal, step_of
from twoaxis.planner.methods import Method, Refusal, fitted, methods
from twoaxis.planner.model.shape import ModelShape
from twoaxis.planner.model_plan import PROMPTS
from twoaxis.planner.page.data import GOALS, Data, controls, first_choice, tables
from twoaxis.planner.setting import Setting

WIDTHS = {
    "front": (470, 330),
    "step": (470, 330),
    "memory": (470, 330),
    "token": (470, 330),
    "cache": (470, 330),
    "state": (980, 330),
    "timeline": (980, 330),
}
"""Widths of each figure in CSS pixels, on a wide screen and on a narrow one."""

FIGURES = {
    "front": (
        "What a method costs",
        "Seconds of a training step beyond the control against the memory of the fullest device. Shaded: over the limit. Names "
        "that would cover others are left out; point at a method to see it, or choose it.",
    ),
    "step": ("A training step", "Seconds beyond the control, the residual stream, whose own are shown."),
    "memory": ("Memory", "Bytes that the fullest device holds at the peak of a training step."),
    "token": (
        "A token of generation",
        "Seconds beyond the control for one more token of every sequence, after all its tokens.",
    ),
    "cache": ("Cache", "Bytes cached for one sequence beyond the control, whose own are shown."),
    "state": (
        "Depth state",
        "Bytes per token from a sublayer to the next, which is what a pipeline sends from a stage to the next.",
    ),
    "timeline": (
        "One training step of the method in detail",
        "Blue: forward passes, orange: backward passes, by the numbers of their microbatches where they fit; later stages of a "
        "rank are paler. Thin bars below: activations and gradients sent. Grey: the rank waits.",
    ),
}

BEST = ("Method", "Step", "Memory", "Token", "Parameters")

COLUMNS = (
    *("Method", "Parameters added", "Training step", "Overhead", "Depth operations", "Exposed communication", "Memory"),
    *("Sent per microbatch", "Token", "Overhead", "Cache", "Prompts read", "Depth state meanwhile"),
)


def planner_page(model: ModelShape, setting: Setting, goal: str = "all", prompts: int = PROMPTS) -> str:
    """Returns the page of a plan, which recomputes it with the same formulas when a reader changes a control.

    Args:
        model: every method is planned for it.
        setting: where the page starts, also without scripts.
        goal: methods that stand out: `all`, `shortcut` or `local-mixing`.
        prompts: sequences that generate at once, where the page starts.

    Raises:
        ConfigError: a setting that cannot run, such as one with more stages than blocks, or another goal.
    """
    goals = tuple(value for value, _ in GOALS)
    if goal not in goals:
        raise ConfigError(problem("goal", goal, f"one of {', '.join(goals)}", "use one of them"))
    found = tables(model, setting)
    choice = first_choice(found, model, setting, prompts)
    if reason := refusal(choice, found["devices"][choice["device"]], model.n_layers):
        raise ConfigError(f"setting: {reason}")
    view = {"goal": goal, "chosen": _chosen(found, choice, goal)}
    page = {"tables": found, "choice": choice, "view": view, "widths": WIDTHS}
    rows = [method_row(found, choice, method) for method in methods_of(found, choice)]
    step = step_of(found, choice, view["chosen"])
    drawn = [
        (name, *FIGURES[name], *(figure(found, choice, rows, step, view, name, at) for at in WIDTHS[name])) for name in FIGURES
    ]
    return render(
        "twoaxis.planner.page/plan.html",
        folder="twoaxis.planner.page",
        title=f"Plan of {model.name}",
        model=model.name,
        groups=controls(found, choice, model, view),
        facts=facts(choice, rows, step, view),
        figures=drawn,
        advice=advice(found, choice, rows, goal),
        evidence=[(name, words, sides(evidence(name))) for name, words in GOALS[1:] if name != "all"],
        best=(BEST, best_rows(found, choice, rows, view)),
        columns=COLUMNS,
        rows=table_rows(found, choice, rows, view),
        refused=[(method.name, reason) for method in methods() if (reason := _reason(method, model, setting))],
        view=view,
        data=page,
    )


def write_page(path: str | Path, model: ModelShape, setting: Setting, goal: str = "all", prompts: int = PROMPTS) -> None:
    """Writes the page into a file atomically.

    Args:
        path: of the file.
        model: as for `planner_page`, like the rest.
        setting: where it starts.
        goal: methods that stand out.
        prompts: sequences that generate at once.

    Raises:
        ConfigError: a setting that cannot run.
        DataError: the file cannot be written.
    """
    text = planner_page(model, setting, goal, prompts)
    with replacing(Path(path)) as file:
        file.write(text.encode())


def sides(found: Sequence[StudyEvidence]) -> list[tuple[str, list[StudyEvidence]]]:
    """The valid studies for a method, against it, and without a decision."""
    groups = (("For", ("for",)), ("Against", ("against",)), ("Mixed or undecided", ("mixed", "undecided")))
    return [(word, [one for one in found if one.side in of]) for word, of in groups]


def _reason(method: Method, model: ModelShape, setting: Setting) -> str:
    """Why a method is not on the page where it starts; "" if it is."""
    shape = fitted(method, model)
    if isinstance(shape, Refusal):
        return shape.reason
    try:
        setting.layout.check(shape, setting.tokens)
    except ConfigError as error:
        return str(error)
    return ""


def _chosen(found: Data, choice: Data, goal: str) -> int:
    """The method in detail: the one that the paper recommends for the goal, if it fits, else the control."""
    wanted = "ShortSWA" if goal == "local-mixing" else "DDL"
    fitting = methods_of(found, choice)
    return next((method for method in fitting if found["methods"][method]["name"] == wanted), fitting[0])
