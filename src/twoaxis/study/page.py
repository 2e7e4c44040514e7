"""The report of a study as one page of HTML that needs nothing else: no script, no font, no network."""

from collections.abc import Sequence
from html import escape

from twoaxis.study import words
from twoaxis.study.analysis import Analysis
from twoaxis.study.figures import Figure
from twoaxis.study.table import ACCURACY_COLUMNS, RESULT_COLUMNS, RUN_COLUMNS, Rows, accuracy_rows, result_rows, run_rows
from twoaxis.study.verdicts import decision_rule, limits, overturn, pairing_sentence, verdict_sentence

STYLE = """
body { margin: 0 auto; max-width: 62rem; padding: 2rem 1.25rem 4rem; color: #1a1a1a; background: #ffffff;
       font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .4rem; }
h2 { font-size: 1.15rem; margin: 2.4rem 0 .6rem; }
.facts, figcaption { color: #555555; font-size: .9rem; }
.error { border-left: 4px solid #b00020; padding: .4rem .9rem; background: #fdecee; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; width: 100%; }
th { font-weight: 600; text-align: left; vertical-align: bottom; border-bottom: 2px solid #1a1a1a; }
th, td { padding: .35rem .6rem; }
td { border-bottom: 1px solid #e4e4e4; vertical-align: top; }
th.number, td.number { text-align: right; }
td.number { white-space: nowrap; }
figure { margin: 1rem 0 0; }
figure svg { max-width: 100%; height: auto; display: block; }
figcaption { margin-top: .3rem; }
li { margin-bottom: .35rem; }
details pre { font-size: .8rem; background: #f6f6f6; padding: .8rem; overflow-x: auto; }
"""


def page(analysis: Analysis, figures: Sequence[Figure], design: str, made: str) -> str:
    """Writes the page.

    Args:
        analysis: what is concluded.
        figures: in order.
        design: the whole design as text.
        made: when the report was made.
    """
    study = analysis.study
    sections = [
        f"<h1>{escape(study.question)}</h1>",
        f'<p class="facts">{escape(_facts(analysis, made))}</p>',
        *(["<h2>Incomplete</h2>", f'<p class="error">{escape(_incomplete(analysis))}</p>'] if not analysis.complete else []),
        "<h2>Answer</h2>",
        _list([verdict_sentence(analysis, arm) for arm in analysis.treatments]),
        "<h2>Result by arm</h2>",
        _table(RESULT_COLUMNS, result_rows(analysis), ("arm", "verdict")),
        "<p class=\"facts\">Difference: mean over replicates of the arm's validation loss minus the control's with the same "
        "seed, in nats per token; below zero is better. Ratios to the control are medians over the pairs.</p>",
        *_accuracies(analysis),
        *(_figure(number, figure) for number, figure in enumerate(figures, 1)),
        "<h2>Decision rule</h2>",
        f"<p>{escape(decision_rule(analysis))}</p>",
        "<h2>Pairing</h2>",
        f"<p{_error_class(analysis)}>{escape(pairing_sentence(analysis))}</p>",
        "<h2>What would overturn it</h2>",
        f"<p>{escape(overturn(analysis))}</p>",
        "<h2>Limits of the evidence</h2>",
        _list(limits(analysis)),
        "<h2>Runs</h2>",
        _table(RUN_COLUMNS, run_rows(analysis), ("arm", "outcome")),
        "<h2>Environment</h2>",
        _table(("", ""), environment_rows(analysis), ("",)),
        f"<h2>Design</h2><details><summary>study.json</summary><pre>{escape(design)}</pre></details>",
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(study.question)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(sections)
        + "\n</body>\n</html>\n"
    )


def environment_rows(analysis: Analysis) -> list[list[str]]:
    """Where the first finished run was made, and on what text, as name and value."""
    run = next((run for run in analysis.runs if run.environment and run.data), None)
    if run is None:
        return [["runs", "none has begun"]]
    corpus, environment = run.data.get("corpus", {}), run.environment
    versions = environment.get("versions", {})
    rows = [
        ("corpus", f"{corpus.get('name', '')} {corpus.get('version') or ''}"),
        ("corpus fingerprint", str(corpus.get("fingerprint", ""))[:16]),
        ("tokens in the vocabulary", str(run.data.get("tokenizer", {}).get("vocab_size", ""))),
        *(
            (f"tokens for {side}", words.count(run.data[side]["tokens"]))
            for side in ("train", "validation")
            if side in run.data
        ),
        *((name, environment.get(name)) for name in ("platform", "processor", "device", "device_name", "precision", "threads")),
        ("commit", environment.get("git_commit")),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items() if version)),
    ]
    return [[name.replace("_", " "), str(value).strip()] for name, value in rows if value not in (None, "", " ")]


def _facts(analysis: Analysis, made: str) -> str:
    study = analysis.study
    recipe = study.recipe(study.control, study.replicates[0])
    seeds = ", ".join(map(str, study.replicates))
    return (
        f"{len(study.arms)} arms, {words.replicates(len(study.replicates))} each (seeds {seeds}), "
        f"{recipe.steps} steps and {words.count(study.tokens_per_run)} tokens per run. Control: {study.control}. "
        f"Metric: validation loss after the last step, nats per token. Report made {made}."
    )


def _incomplete(analysis: Analysis) -> str:
    planned, finished = len(analysis.runs), sum(run.status == "finished" for run in analysis.runs)
    if finished == planned:
        return "All runs have finished, but not all of them are pairs; see Pairing."
    return (
        f"{finished} of {planned} runs have finished. Arms without all of their replicates get no verdict. "
        "Run the study again to complete it; what has finished is kept."
    )


def _error_class(analysis: Analysis) -> str:
    return ' class="error"' if any(pair.problems for pair in analysis.pairs) else ""


def _accuracies(analysis: Analysis) -> list[str]:
    rows = accuracy_rows(analysis)
    if not rows:
        return []
    note = (
        "Part of the answers that were the most likely token, after the last step. It is shown beside the loss, and decides "
        "nothing."
    )
    return ["<h2>Accuracy</h2>", _table(ACCURACY_COLUMNS, rows, ("arm",)), f'<p class="facts">{note}</p>']


def _list(sentences: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences) + "</ul>"


def _table(columns: Sequence[str], rows: Rows, words_in: Sequence[str]) -> str:
    kinds = ["" if column in words_in else ' class="number"' for column in columns]
    head = "".join(f"<th{kind}>{escape(column)}</th>" for kind, column in zip(kinds, columns, strict=True))
    body = "".join("<tr>" + "".join(map(_cell, kinds, row)) + "</tr>" for row in rows)
    heading = f"<thead><tr>{head}</tr></thead>" if any(columns) else ""
    return f'<div class="wide"><table>{heading}<tbody>{body}</tbody></table></div>'


def _cell(kind: str, text: str) -> str:
    return f"<td{kind}>{escape(text)}</td>"


def _figure(number: int, figure: Figure) -> str:
    label = escape(f"{figure.title}. {figure.caption}", quote=True)
    svg = figure.svg().replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
    caption = f"Figure {number}. {figure.caption}"
    return f"<h2>{escape(figure.title)}</h2><figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"
