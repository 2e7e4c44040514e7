"""`twoaxis evaluate MODEL`: the perplexity of texts, and the results of tasks."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twoaxis.api import Loaded
from twoaxis.cli.models import SOURCES, Step, model_to_run
from twoaxis.cli.output import Json, name_of, print_json
from twoaxis.core.errors import ConfigError, DataError
from twoaxis.core.text import read_text
from twoaxis.display.tables import print_item, print_table

if TYPE_CHECKING:
    from twoaxis.interop.evaluate import TaskFolder
    from twoaxis.train import Progress


def evaluate(
    model: Annotated[Path, typer.Argument(help=SOURCES)],
    text: Annotated[list[Path] | None, typer.Option(help="A text in UTF-8 to score as one document; may be repeated.")] = None,
    tasks: Annotated[str | None, typer.Option(metavar="NAMES", help="Tasks of lm-eval, as a,b; needs --include.")] = None,
    include: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The folder of the task files; they may run code.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Examples of each task; all without it.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences that are read at once.")] = 8,
    stride: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a text that a later window scores; half of max_seq_len without it.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the JSON there too.")] = None,
    step: Step = None,
    as_json: Json = False,
) -> None:
    """Measure perplexity and bits per byte of texts, and run tasks of lm-eval (needs the extra twoaxis[evaluate]).

    Every token of a text is scored once: the first after the end-of-document token, or as one of V equally likely tokens if the
    tokenizer has none; texts longer than max_seq_len in windows, of which each one after the first scores `stride` tokens and
    only reads the rest. Tasks come from the YAML files of DIR alone, and relative paths in them are relative to DIR. Nothing
    is downloaded unless HF_HUB_OFFLINE=0 is set.

    Example: twoaxis evaluate runs/delta --text README.md --tasks idioms,sentences --include examples/evaluate
    """
    from twoaxis.train import console_progress

    if not text and tasks is None:
        raise ConfigError("nothing to evaluate; name a text with --text, or tasks with --tasks and --include")
    if stride is not None and not text:
        raise ConfigError(f"stride={stride}: must come with a text, whose windows it moves; add --text, or leave it out")
    if limit is not None and tasks is None:
        raise ConfigError(f"limit={limit}: must come with tasks, whose examples it limits; add --tasks, or leave it out")
    texts = _read(text or [])
    folder = _open(tasks, include)
    progress = console_progress()
    try:
        loaded = model_to_run(model, step, progress.note)
        report: dict[str, Any] = {"model": name_of(model), "step": loaded.step}
        if texts:
            report["text"] = _score(loaded, texts, batch_size, stride, progress)
        if folder:
            from twoaxis.interop.evaluate import run_tasks

            tools = {"note": progress.note, "progress": progress.preparing, "ends": loaded.ends}
            report |= run_tasks(loaded.model, loaded.tokenizer, folder, limit, batch_size, **tools)
    finally:
        progress.stop()
    if as_json:
        print_json(report)
    else:
        _print(report)
    # Last, so that the result is printed even if the disk is full.
    if out:
        _write(out, report)


def _read(paths: Sequence[Path]) -> dict[str, str]:
    texts = {}
    for path in paths:
        name = name_of(path)
        texts[name] = read_text(path, f"text {name}", "name a text in UTF-8")
        if not texts[name]:
            raise DataError(f"text {name}: is empty; must hold at least one character; name another text")
    return texts


def _open(tasks: str | None, include: Path | None) -> "TaskFolder | None":
    if tasks is None and include is None:
        return None
    names = [name.strip() for name in (tasks or "").split(",") if name.strip()]
    if not names:
        raise ConfigError("--include without --tasks: must come with the names of tasks; name them as --tasks a,b")
    if include is None:
        raise ConfigError("--tasks without --include: must come with the folder of the task files; name it with --include DIR")
    from twoaxis.interop.evaluate import open_tasks

    return open_tasks(names, include)


def _score(
    loaded: Loaded, texts: Mapping[str, str], batch_size: int, stride: int | None, progress: "Progress"
) -> dict[str, Any]:
    from twoaxis.interop.evaluate import score_texts, total_score

    scores = score_texts(loaded.model, loaded.tokenizer, texts, batch_size, stride, progress.preparing)
    longest, tokenizer = loaded.model.config.max_seq_len, loaded.tokenizer
    marker = "begin" if tokenizer.begin_of_document else "end"
    return {
        "window_tokens": longest,
        "stride_tokens": stride or max(1, longest // 2),
        "first_token": f"after {marker} of document" if tokenizer.before_text else "uniform",
        "texts": [one.to_data() for one in scores],
        "total": total_score(scores).to_data(),
    }


def _write(path: Path, report: Mapping[str, Any]) -> None:
    from twoaxis.core.files import replacing

    with replacing(path, "name another file with --out") as file:
        file.write(json.dumps(report, indent=1, ensure_ascii=False).encode() + b"\n")


def _print(report: Mapping[str, Any]) -> None:
    if "text" in report:
        from twoaxis.data.restoration import Restoration

        text = report["text"]
        rows = text["texts"] if len(text["texts"]) == 1 else [*text["texts"], text["total"]]
        columns = ("text", "tokens", "bytes", "nats per token", "perplexity", "bits per byte")
        cells = [
            (one["name"], f"{one['tokens']:,}", f"{one['text_bytes']:,}", *_rounded(one["loss"], one["perplexity"], one["bpb"]))
            for one in rows
        ]
        print_table(report["model"], columns, cells, columns[1:])
        for one in text["texts"]:
            restored = Restoration(one["text_bytes"], one["lost_bytes"], one["repair_bits"])
            if said := restored.words(one["name"]):
                print_item(said, "")
        print_item(
            f"windows of {text['window_tokens']:,} tokens, of which later ones score {text['stride_tokens']:,}; "
            f"first token: {text['first_token']}",
            "",
        )
    if "tasks" in report:
        columns = ("task", "version", "examples", "metric", "value", "standard error")
        cells = [
            (name, one["version"], one["examples"], metric, *_rounded(found["value"], found["stderr"]))
            for name, one in report["tasks"].items()
            for metric, found in one["metrics"].items()
        ]
        print_table(f"{report['model']}, lm-eval {report['lm_eval']}", columns, cells, columns[4:])


def _rounded(*values: Any) -> list[str]:
    """Numbers to five digits; "" for None, and JSON for results that are no numbers."""
    return ["" if one is None else f"{one:.5g}" if isinstance(one, float) else json.dumps(one) for one in values]
