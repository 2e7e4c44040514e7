"""The head of a report and its appendix: question, answer, verdicts; settings, runs, and how to reproduce it."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from twoaxis.display import numbers as words
from twoaxis.display.html import Cell, Markup, bullets, code, details, heading, number, paragraph, part, section, table
from twoaxis.study.page.costs import setting
from twoaxis.study.report_data import ArmData, ComparisonData, ReportData, RunData

TEMPLATE = "twoaxis.study.page/answer.html"

SIGNS = {"better": "▼", "worse": "▲", "undecided": "◆", "none": "○"}
"""Signs of the verdicts, so that colour is not the only cue; down is a lower loss."""

STRIP = 120
"""Width of the interval on a chip, in pixels."""


def header(data: ReportData) -> Markup:
    """The question, the answer, the validity gate, and the main facts."""
    gate = None if data.gate is None else {True: "passed", False: "failed", None: "unknown"}[data.gate.passed]
    state = "complete" if data.complete else "incomplete"
    return part(TEMPLATE, "header", data, state, gate, problems(data), _facts(data))


def problems(data: ReportData) -> list[str]:
    """Warnings before the verdicts: missing runs and broken pairs."""
    found = []
    wanted = [run for run in data.runs if run.role != "trial"]
    finished = sum(run.status == "finished" for run in wanted)
    if finished < len(wanted):
        found.append(
            f"{finished} of {len(wanted)} runs have finished. Arms without all of their replicates get no verdict. Run the "
            "study again to complete it; what has finished is kept."
        )
    if any(pair.get("problems") for pair in data.pairing.pairs):
        found.append(data.pairing.sentence)
    return found


def verdicts(data: ReportData) -> Markup:
    """One chip per treatment, then one per contrast."""
    scale = _reach(data)
    arms = sorted(
        ((name, arm) for name, arm in data.arms.items() if arm.role == "treatment"), key=lambda item: _rank(data, item[1])
    )
    chips = [_chip(name, _comparison(data, arm), arm.no_verdict, arm.sentence, scale) for name, arm in arms]
    contrasts = [
        _chip(f"{one.arm} {words.MINUS} {one.against}", one.comparison, one.no_verdict, one.sentence, scale)
        for one in data.contrasts
    ]
    kinds = [(one.comparison.verdict if one.comparison else None) or "no verdict" for one in data.contrasts]
    said = ", ".join(f"{kinds.count(word)} {word}" for word in ("better", "worse", "undecided", "no verdict") if word in kinds)
    noun = "contrast between arms, which rules" if len(contrasts) == 1 else "contrasts between arms, which rule"
    return part(TEMPLATE, "chips", "treatment", chips) + details(
        f"{len(contrasts)} {noun} out other explanations: {said}", part(TEMPLATE, "chips", "companion", contrasts)
    )


def _facts(data: ReportData) -> list[tuple[str, str]]:
    control = data.arms[data.control]
    treatments, companions = (sum(arm.role == role for arm in data.arms.values()) for role in ("treatment", "companion"))
    arms = f"{treatments} + {companions} companions" if companions else str(treatments)
    found = [
        ("control", data.control),
        ("arms compared with it", arms),
        ("replicates of each", str(control.replicates_planned)),
        ("tokens per run", words.count(control.tokens)),
    ]
    spent = [
        ("runs", "all runs", lambda value: f"{value:.0f}"),
        ("training_flops", "FLOPs in all", words.count),
        ("train_seconds", "training in all", words.duration),
    ]
    return found + [(title, written(data.spent[key])) for key, title, written in spent if key in data.spent]


def _comparison(data: ReportData, arm: ArmData) -> ComparisonData | None:
    found = arm.charged.get(data.charge)
    return found.comparison if found else None


def _rank(data: ReportData, arm: ArmData) -> float:
    comparison = _comparison(data, arm)
    return comparison.mean_difference if comparison else float("inf")


def _reach(data: ReportData) -> tuple[float, float]:
    """The range of the strips: zero, all means, and intervals up to three times the largest mean."""
    found = [comparison for arm in data.arms.values() if (comparison := _comparison(data, arm))]
    found += [one.comparison for one in data.contrasts if one.comparison is not None]
    most = 3 * max((abs(comparison.mean_difference) for comparison in found), default=1.0)
    ends = [end for one in found for end in one.simultaneous or one.ci95 or (one.mean_difference,)]
    ends = [min(max(end, -most), most) for end in ends]
    return min([*ends, 0.0]), max([*ends, 0.0])


def _chip(name: str, comparison: ComparisonData | None, why: str, sentence: str, reach: tuple[float, float]) -> dict[str, Any]:
    kind = (comparison.verdict if comparison else None) or "none"
    word = (comparison.remark if comparison else "") or "no verdict"
    chip: dict[str, Any] = {"name": name, "kind": kind, "word": word, "why": why, "sentence": sentence, "sign": SIGNS[kind]}
    if comparison is None:
        return chip | {"ends": None}
    low, high = comparison.simultaneous or comparison.ci95 or (comparison.mean_difference,) * 2
    family = f", family of {comparison.family}" if comparison.family and comparison.verdict else ""
    return chip | {
        "mean": words.signed(comparison.mean_difference),
        "interval": words.interval(low, high) + family,
        "ends": _strip(comparison.mean_difference, low, high, reach),
        "width": STRIP,
    }


def _strip(mean: float, low: float, high: float, reach: tuple[float, float]) -> list[float]:
    """Positions of zero, both ends and the mean on a chip, in pixels."""
    span = reach[1] - reach[0] or 1.0
    ends = (0.0, low, mean, high)
    return [round(5 + (STRIP - 10) * (min(max(end, reach[0]), reach[1]) - reach[0]) / span, 1) for end in ends]


def evidence(data: ReportData) -> str:
    """The decision rule, the pairing, evidence that would overturn the verdicts, and limits."""
    broken = "error" if any(pair.get("problems") for pair in data.pairing.pairs) else ""
    return section(
        "evidence",
        "How far the evidence reaches",
        heading("Decision rule"),
        paragraph(data.decision_rule),
        heading("Pairing"),
        paragraph(data.pairing.sentence, broken),
        heading("What would overturn it"),
        paragraph(data.overturn),
        heading("Limits of the evidence"),
        bullets(data.limits),
    )


def reproduce(data: ReportData) -> str:
    """The command, the environment, and every setting."""
    return section(
        "reproduce",
        "Reproduce it",
        part("twoaxis.study.page/answer.html", "command", data.command),
        details("Environment", _environments(data)),
        details("Every setting", _settings(data), _differences(data)),
    )


def runs(data: ReportData) -> str:
    """All runs; unfinished ones are always visible."""
    lost = [run for run in data.runs if run.status not in ("finished", "not started")]
    finished = sum(run.status == "finished" for run in data.runs)
    reused = sum(bool(run.reused_from) for run in data.runs)
    summary = f"All {len(data.runs)} runs: {finished} finished" + (
        f", {reused} of them made by another study" if reused else ""
    )
    rows = [_run(run) for run in data.runs]
    columns = ("arm", "seed", "why", "outcome", "validation loss", "tokens", "tokens per s", "training", "peak memory", "from")
    text = ("why", "outcome", "from")
    return section(
        "runs",
        "Runs",
        table("Runs that did not finish", columns, map(_run, lost), text=text) if lost else "",
        details(summary, table("All runs, including trials; losses in nats per token", columns, rows, text=text)),
    )


def design(data: ReportData) -> str:
    """The design, as in its file."""
    text = json.dumps(data.design, indent=1, ensure_ascii=False)
    return section("design", "Design", details("study.json", code(text)))


def _run(run: RunData) -> tuple[Cell, ...]:
    result = run.result or {}
    outcome = run.status if run.status in ("finished", "not started") else f"{run.status}: {run.message}"
    memory = result.get("peak_device_memory_bytes") or result.get("peak_memory_bytes")
    return (
        run.arm,
        number(run.seed, str),
        run.role,
        outcome,
        number(run.loss, words.loss),
        number(result.get("tokens"), words.count),
        number(result.get("tokens_per_second"), lambda value: f"{value:,.0f}"),
        number(result.get("train_seconds"), words.duration),
        number(memory, words.memory),
        run.reused_from or "this study",
    )


def _environments(data: ReportData) -> str:
    """Data and environment of the first run."""
    run = next((run for run in data.runs if run.environment and run.data), None)
    if run is None:
        return paragraph("No run has begun.")
    rows = [
        (path, setting(value)) for path, value in (*_flat(run.data, ""), *_flat(run.environment, "")) if value not in (None, "")
    ]
    return table("Text and environment of the first run", ("name", "value"), rows, text=("value",))


def _recipes(data: ReportData) -> dict[str, dict[str, Any]]:
    """Flat settings by arm, without the seed."""
    found: dict[str, dict[str, Any]] = {}
    for run in data.runs:
        if run.recipe and run.arm in data.arms:
            found.setdefault(run.arm, {path: value for path, value in _flat(run.recipe, "") if path != "seed"})
    return found


def _settings(data: ReportData) -> str:
    recipe = _recipes(data).get(data.control, {})
    rows = [(path, setting(value)) for path, value in recipe.items()]
    return table(f"Settings of {data.control}", ("setting", "value"), rows, text=("value",)) if rows else ""


def _differences(data: ReportData) -> str:
    recipes = _recipes(data)
    control, rows = recipes.get(data.control, {}), []
    for name, recipe in recipes.items():
        if name != data.control:
            for path in dict.fromkeys([*control, *recipe]):
                if control.get(path) != recipe.get(path):
                    rows.append((name, path, setting(control.get(path)), setting(recipe.get(path))))
    columns = ("arm", "setting", data.control, "here")
    return table("Settings in which an arm differs", columns, rows, text=columns[1:]) if rows else ""


def _flat(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Leaves of nested tables with their dotted paths; a list is a leaf."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{path}.{key}" if path else str(key))
    elif path:
        yield path, value
