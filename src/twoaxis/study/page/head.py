"""The first screen of a report, and of its appendix the evidence, settings, runs, and how to reproduce it."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from twoaxis.display import numbers as words
from twoaxis.display.html import Cell, Markup, bullets, code, details, heading, joined, number, paragraph, part, table
from twoaxis.study.page.costs import setting
from twoaxis.study.report.answer import COMPLETE, outlook
from twoaxis.study.report_data import ReportData, RunData

TEMPLATE = "twoaxis.study.page/answer.html"


def header(data: ReportData, verdicts: str) -> Markup:
    """The first screen: question, answer, validity gate, the figure of the verdicts, and what would decide the rest."""
    gate = None if data.gate is None else {True: "passed", False: "failed", None: "unknown"}[data.gate.passed]
    state = "complete" if data.complete else "incomplete"
    return part(TEMPLATE, "header", data, state, gate, problems(data), verdicts, _facts(data))


def problems(data: ReportData) -> list[str]:
    """Warnings before the verdicts: missing runs and broken pairs."""
    found = []
    wanted = [run for run in data.runs if run.role != "trial"]
    finished, diverged = (sum(run.status == status for run in wanted) for status in ("finished", "diverged"))
    if finished < len(wanted):
        found.append(
            f"{finished} of {len(wanted)} runs have finished{f', {diverged} have diverged' if diverged else ''}. Arms without "
            f"all of their replicates get no verdict.{f' {COMPLETE}' if finished + diverged < len(wanted) else ''}"
        )
    if any(pair.get("problems") for pair in data.pairing.pairs):
        found.append(data.pairing.sentence)
    return found


def _facts(data: ReportData) -> list[tuple[str, str]]:
    control, (decide, following) = data.arms[data.control], outlook(data)
    compared = [each.comparison for arm in data.arms.values() for each in arm.charged.values()]
    family = max((one.family for one in compared if one is not None), default=0)
    return [
        ("replicates of each arm", str(control.replicates_planned)),
        ("comparisons in the family", str(family or "")),
        ("tokens per run", words.count(control.tokens)),
        ("parameters", "" if control.parameters is None else words.count(control.parameters)),
        ("what would decide the rest", decide),
        ("what next", following),
    ]


def evidence(data: ReportData) -> str:
    """The decision rule, the pairing, evidence that would overturn the verdicts, and limits."""
    broken = "error" if any(pair.get("problems") for pair in data.pairing.pairs) else ""
    return joined(
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
    return joined(
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
    return joined(
        table("Runs that did not finish", columns, map(_run, lost), text=text) if lost else "",
        details(summary, table("All runs, including trials; losses in nats per token", columns, rows, text=text)),
    )


def design(data: ReportData) -> str:
    """The design, as in its file."""
    text = json.dumps(data.design, indent=1, ensure_ascii=False)
    return code(text)


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
